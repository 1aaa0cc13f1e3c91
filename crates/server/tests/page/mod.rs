//! The description of the API as a page for people: routes by subject, then the types.
//!
//! Knows the parts of OpenAPI that our own description uses, and panics at any other, so that nothing is left out in
//! silence.

use std::fmt::Write;

use serde_json::{Map, Value};

/// The subjects, in the order in which people need them.
const SUBJECTS: [(&str, &str); 8] = [
    ("sandboxes", "Sandboxes"),
    ("commands", "Commands"),
    ("files", "Files"),
    ("images", "Images"),
    ("ports", "Ports"),
    ("stats", "Stats and metrics"),
    ("keys", "Keys"),
    ("system", "The daemon"),
];
/// Where types are.
const TYPES: &str = "#/components/schemas/";

/// The page.
pub fn write(description: &Value) -> String {
    let routes = routes(description);
    let mut page = String::from(HEAD);
    let mut subjects: Vec<(&str, String)> =
        SUBJECTS.iter().map(|(tag, title)| (*tag, (*title).to_owned())).collect();
    for route in &routes {
        if !subjects.iter().any(|(tag, _)| *tag == route.tag) {
            // A subject that has no title yet is not left out.
            subjects.push((route.tag, route.tag.to_owned()));
        }
    }
    for (tag, title) in subjects {
        let own: Vec<&Route<'_>> = routes.iter().filter(|route| route.tag == tag).collect();
        if own.is_empty() {
            continue;
        }
        let _ = write!(page, "\n## {title}\n");
        for route in own {
            route.write(&mut page);
        }
    }
    page.push_str(
        "\n## Types\n\nFields marked `?` may be left out, or are absent where there is nothing to say.\n",
    );
    let types = description["components"]["schemas"].as_object().expect("there are types");
    for (name, schema) in types {
        write_type(&mut page, name, schema);
    }
    page
}

const HEAD: &str = "\
# The HTTP API

Every route and every type of the native API.
This page is written from the description that the daemon serves at `/v1/openapi.json` ([openapi.json](openapi.json)).

Every route needs an api key, as `Authorization: Bearer …` or `X-Api-Key: …`, except `/v1/health` and `/v1/ready`.
Every failure answers with an [ErrorBody](#errorbody), whose codes are in [errors.md](errors.md).
Failures that many routes share are in openapi.json and not repeated here: 400, 401, 403, 404, 408, 413, 414, 415, 421, 431, 500 and 503.
Times are RFC 3339 in UTC, and numbers carry their unit in their name.
Unknown fields and parameters are refused.
";

struct Route<'a> {
    method: String,
    path: &'a str,
    tag: &'a str,
    operation: &'a Map<String, Value>,
}

fn routes(description: &Value) -> Vec<Route<'_>> {
    let mut routes = Vec::new();
    for (path, methods) in description["paths"].as_object().expect("there are paths") {
        let methods = methods.as_object().expect("a path has methods");
        for (method, operation) in methods {
            let operation = operation.as_object().expect("an operation is an object");
            let tag = operation["tags"][0].as_str().expect("an operation has a tag");
            routes.push(Route { method: method.to_uppercase(), path, tag, operation });
        }
    }
    routes
}

impl Route<'_> {
    fn write(&self, page: &mut String) {
        let _ = write!(page, "\n### `{} {}`\n\n", self.method, self.path);
        for key in ["summary", "description"] {
            if let Some(text) = self.operation.get(key).and_then(Value::as_str) {
                let _ = writeln!(page, "{}", prose(text));
            }
        }
        self.write_parameters(page);
        if let Some(body) = self.operation.get("requestBody") {
            let _ = write!(page, "\nBody: {}.\n", content(&body["content"]));
        }
        self.write_answers(page);
    }

    fn write_parameters(&self, page: &mut String) {
        let none = Vec::new();
        let parameters = self.operation.get("parameters").and_then(Value::as_array).unwrap_or(&none);
        // What is in the path speaks for itself.
        let told: Vec<&Value> = parameters.iter().filter(|parameter| parameter["in"] != "path").collect();
        if told.is_empty() {
            return;
        }
        page.push_str("\n| parameter | in | type | means |\n| --- | --- | --- | --- |\n");
        for parameter in told {
            let name = parameter["name"].as_str().expect("a parameter has a name");
            let optional = if parameter["required"] == true { "" } else { "?" };
            let place = parameter["in"].as_str().expect("a parameter has a place");
            let kind = kind(&parameter["schema"]);
            let means = cell(parameter["description"].as_str().unwrap_or(""));
            let _ = writeln!(page, "| `{name}`{optional} | {place} | {kind} | {means} |");
        }
    }

    fn write_answers(&self, page: &mut String) {
        page.push_str("\n| status | answer | when |\n| --- | --- | --- |\n");
        for (status, answer) in self.operation["responses"].as_object().expect("there are answers") {
            if answer["$ref"].is_string() {
                // Shared by many routes, and told at the top.
                continue;
            }
            let when = cell(answer["description"].as_str().unwrap_or(""));
            let _ = writeln!(page, "| {status} | {} | {when} |", content(&answer["content"]));
        }
    }
}

/// A body, by its media type.
fn content(content: &Value) -> String {
    let Some(content) = content.as_object() else { return "nothing".into() };
    let kinds = content.iter().map(|(media, body)| match media.as_str() {
        "application/json" => kind(&body["schema"]),
        "text/event-stream" => format!("server-sent events, each a {}", kind(&body["schema"])),
        other => format!("`{other}`"),
    });
    kinds.collect::<Vec<_>>().join(" or ")
}

fn write_type(page: &mut String, name: &str, schema: &Value) {
    let _ = write!(page, "\n### {name}\n\n");
    if let Some(text) = schema["description"].as_str() {
        let _ = writeln!(page, "{}", prose(text));
    }
    let variants = schema["oneOf"].as_array();
    if let Some(types) = variants.filter(|variants| variants.iter().all(|one| one["$ref"].is_string())) {
        // A choice between types of their own.
        page.push('\n');
        for choice in types {
            let _ = writeln!(page, "- {}: {}", kind(choice), choice["description"].as_str().unwrap_or(""));
        }
    } else if let Some(variants) = variants {
        page.push_str("\n| `type` | means | fields |\n| --- | --- | --- |\n");
        for variant in variants {
            write_variant(page, variant);
        }
    } else if schema["enum"].is_array() {
        let _ = write!(page, "\nOne of {}.\n", values(schema));
    } else {
        let (parents, fields) = fields(schema);
        for parent in parents {
            let _ = write!(page, "\nAll fields of {parent}, and:\n");
        }
        page.push_str("\n| field | type | means |\n| --- | --- | --- |\n");
        for field in fields {
            let _ = writeln!(page, "| {} | {} | {} |", field.name, field.kind, field.means);
        }
    }
}

/// One of several shapes, distinguished by their `type`.
fn write_variant(page: &mut String, variant: &Value) {
    let (parents, fields) = fields(variant);
    let tag = fields.iter().find(|field| field.name == "`type`").expect("variants have a `type`");
    let mut told: Vec<String> = parents.iter().map(|parent| format!("those of {parent}")).collect();
    for field in fields.iter().filter(|field| field.name != "`type`") {
        told.push(format!("{} ({}): {}", field.name, field.kind, field.means));
    }
    let means = cell(variant["description"].as_str().unwrap_or(""));
    let _ = writeln!(page, "| {} | {means} | {} |", tag.kind, told.join("<br>"));
}

struct Field {
    name: String,
    kind: String,
    means: String,
}

/// The types that a type takes its fields from, and the fields of its own.
fn fields(schema: &Value) -> (Vec<String>, Vec<Field>) {
    let mut parents = Vec::new();
    let mut own = Vec::new();
    let parts = schema["allOf"].as_array().cloned().unwrap_or_else(|| vec![schema.clone()]);
    for part in parts {
        if part["$ref"].is_string() {
            parents.push(kind(&part));
            continue;
        }
        let required = part["required"].as_array().cloned().unwrap_or_default();
        for (name, field) in part["properties"].as_object().unwrap_or(&Map::new()) {
            let optional = if required.iter().any(|one| one == name) { "" } else { "?" };
            // In a choice with `null`, the words are inside.
            let inside =
                field["oneOf"].as_array().and_then(|choices| choices.first()?["description"].as_str());
            let means = field["description"].as_str().or(inside).unwrap_or("");
            own.push(Field { name: format!("`{name}`{optional}"), kind: kind(field), means: cell(means) });
        }
    }
    (parents, own)
}

/// A type in words.
fn kind(schema: &Value) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        let name = reference.strip_prefix(TYPES).expect("types are in one place");
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let told = choices.iter().filter(|choice| choice["type"] != "null");
        return told.map(kind).collect::<Vec<_>>().join(" or ");
    }
    if schema["enum"].is_array() {
        return values(schema);
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(several) => {
            several.iter().filter_map(Value::as_str).filter(|one| *one != "null").collect()
        }
        // Anything: what it is, the text says.
        Value::Null => return "any".into(),
        other => panic!("nobody knows this type: {other}"),
    };
    let words = types.into_iter().map(|one| match one {
        "array" => format!("list of {}", kind(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            format!("map of {}", kind(&schema["additionalProperties"]))
        }
        other => other.to_owned(),
    });
    words.collect::<Vec<_>>().join(" or ")
}

fn values(schema: &Value) -> String {
    let values = schema["enum"].as_array().expect("an enum has values");
    values
        .iter()
        .map(|value| format!("`{}`", value.as_str().unwrap_or_default()))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Text as a paragraph: lines were broken for the source.
fn prose(text: &str) -> String {
    text.split("\n\n").map(|paragraph| paragraph.replace('\n', " ")).collect::<Vec<_>>().join("\n\n")
}

/// Text in a cell of a table.
fn cell(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}
