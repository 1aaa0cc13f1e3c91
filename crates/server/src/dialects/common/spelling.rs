//! Ids in the alphabets of other systems: the same 128 bits in other digits, so that no table is needed to find them.

/// Digits and small letters.
pub const SMALL: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyz";
/// Digits and letters.
pub const LETTERS: &[u8] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Bits as exactly `width` digits, which must be enough for 128 bits.
pub fn write(mut bits: u128, alphabet: &[u8], width: usize) -> String {
    let base = alphabet.len() as u128;
    let mut digits = vec![alphabet[0]; width];
    for digit in digits.iter_mut().rev() {
        *digit = alphabet[(bits % base) as usize];
        bits /= base;
    }
    digits.into_iter().map(char::from).collect()
}

/// The bits that [`write()`] has written so; `None` for any other text.
pub fn read(text: &str, alphabet: &[u8], width: usize) -> Option<u128> {
    if text.len() != width {
        return None;
    }
    let base = alphabet.len() as u128;
    text.bytes().try_fold(0u128, |bits, byte| {
        let digit = alphabet.iter().position(|known| *known == byte)?;
        bits.checked_mul(base)?.checked_add(digit as u128)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_one_spelling_in_each_alphabet() {
        for (alphabet, width) in [(SMALL, 25), (LETTERS, 22)] {
            for bits in [0, 1, 35, 36, 1 << 64, u128::MAX] {
                let text = write(bits, alphabet, width);
                assert_eq!((text.len(), read(&text, alphabet, width)), (width, Some(bits)), "{text}");
            }
            let over = char::from(*alphabet.last().expect("it has digits")).to_string().repeat(width);
            for wrong in ["", "0", "-", &"!".repeat(width), &over] {
                assert_eq!(read(wrong, alphabet, width), None, "{wrong}");
            }
        }
    }
}
