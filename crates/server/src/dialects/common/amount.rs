//! Amounts as other systems write them.

/// In the largest binary unit that divides it: what people wrote, most of the time.
pub fn bytes_text(bytes: u64) -> String {
    let units = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
    match units.iter().find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift)) {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_written_as_people_write_them() {
        for (bytes, text) in [(512 << 20, "512Mi"), (1 << 30, "1Gi"), (1536 << 20, "1536Mi"), (1000, "1000")]
        {
            assert_eq!(bytes_text(bytes), text);
        }
    }
}
