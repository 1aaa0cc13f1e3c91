//! JSON in ASCII.

/// JSON with escapes for everything beyond ASCII: some clients split lines at whatever Unicode calls the end of one.
pub fn ascii(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() {
            text.push(character);
        } else {
            for unit in character.encode_utf16(&mut [0; 2]) {
                text.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn events_hold_nothing_that_ends_a_line() {
        let data = json!({"error": "a\u{2028}b\u{85}🐟\n"});
        let text = ascii(&data.to_string());
        assert!(text.is_ascii() && !text.contains('\n'), "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).expect("it is JSON"), data);
    }
}
