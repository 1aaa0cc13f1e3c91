//! The committed description of the API is the one that the daemon serves.

use std::path::Path;

#[test]
fn the_committed_description_has_not_drifted() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/openapi.json");
    let now = shoal_server::native::openapi::json();
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        std::fs::write(&path, &now).expect("the description can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == now,
        "docs/reference/openapi.json is not what the code says; look at what changed and update it with\n    \
         UPDATE_OPENAPI=1 cargo test -p shoal-server --test openapi"
    );
}

#[test]
fn it_is_openapi_3_1_and_every_route_says_who_may() {
    let description: serde_json::Value =
        serde_json::from_str(&shoal_server::native::openapi::json()).expect("it is JSON");
    assert!(description["openapi"].as_str().expect("a version").starts_with("3.1"));
    assert!(description["security"].as_array().is_some_and(|schemes| schemes.len() == 2));
    let paths = description["paths"].as_object().expect("paths");
    assert_eq!(paths.len(), 88);
    let mut ids = std::collections::BTreeSet::new();
    for (path, operation) in paths.iter().flat_map(|(path, item)| {
        item.as_object().expect("a path has methods").values().map(move |operation| (path, operation))
    }) {
        let id = operation["operationId"].as_str().expect("an id");
        assert!(ids.insert(id), "{id} is there twice");
        let open = operation["security"] == serde_json::json!([{}]);
        assert_eq!(open, ["/v1/health", "/v1/ready"].contains(&path.as_str()), "{path}");
        let responses = operation["responses"].as_object().expect("responses");
        assert!(open || responses.contains_key("401"), "{path}");
        for (status, response) in responses {
            let told = response["$ref"].is_string()
                || response["description"].as_str().is_some_and(|text| !text.is_empty());
            assert!(told, "{path}: {status} has no description");
        }
    }
}
