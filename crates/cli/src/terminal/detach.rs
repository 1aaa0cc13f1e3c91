//! The keys that leave a terminal and let the command in it go on.
//!
//! Keys that begin the sequence are held back until it is known whether the rest follows; whoever holds a [`Watch`]
//! releases them after a moment, so that Ctrl-P alone still means what it means to a shell.

use std::fmt;
use std::str::FromStr;

/// What people know from other tools, and what every keyboard has.
pub const DEFAULT: &str = "ctrl-p,ctrl-q";
/// The longest sequence.
const KEYS_MAX: usize = 8;

/// The keys, as bytes. None: there is no way to leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetachKeys(Vec<u8>);

/// Why a sequence cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadKeys {
    /// Not a key.
    #[error("`{key}` is not a key: write a character, or `ctrl-` and one of a to z, @, [, \\, ], ^ and _")]
    Key {
        /// As it was given.
        key: String,
    },
    /// Too many.
    #[error("at most {KEYS_MAX} keys")]
    TooMany,
}

impl FromStr for DetachKeys {
    type Err = BadKeys;

    fn from_str(text: &str) -> Result<Self, BadKeys> {
        if text == "none" {
            return Ok(Self(Vec::new()));
        }
        let keys = text.split(',').map(key).collect::<Result<Vec<u8>, _>>()?;
        if keys.len() > KEYS_MAX { Err(BadKeys::TooMany) } else { Ok(Self(keys)) }
    }
}

fn key(text: &str) -> Result<u8, BadKeys> {
    let lower = text.to_ascii_lowercase();
    match (lower.strip_prefix("ctrl-").map(str::as_bytes), text.as_bytes()) {
        (Some([letter @ (b'a'..=b'z' | b'@' | b'[' | b'\\' | b']' | b'^' | b'_')]), _) => Ok(letter & 0x1f),
        (None, [character @ b'!'..=b'~']) => Ok(*character),
        (Some(_), _) | (None, _) => Err(BadKeys::Key { key: text.to_owned() }),
    }
}

/// As people read them: `Ctrl-P Ctrl-Q`.
impl fmt::Display for DetachKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, key) in self.0.iter().enumerate() {
            let space = if at > 0 { " " } else { "" };
            match key {
                0..0x20 => write!(f, "{space}Ctrl-{}", char::from(key | 0x40))?,
                _ => write!(f, "{space}{}", char::from(*key))?,
            }
        }
        Ok(())
    }
}

impl DetachKeys {
    /// No way to leave.
    pub fn none() -> Self {
        Self(Vec::new())
    }

    /// Whether there is no way to leave.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }
}

/// Looks for the keys in what is typed.
#[derive(Debug)]
pub struct Watch {
    keys: DetachKeys,
    /// How many of the keys have been typed and are held back.
    held: usize,
}

/// What became of what was typed.
#[derive(Debug, PartialEq, Eq)]
pub enum Typed {
    /// For the command. Empty while all of it is held back.
    Bytes(Vec<u8>),
    /// Before the keys came this was typed, then the keys.
    Detach(Vec<u8>),
}

impl Watch {
    /// Nothing typed yet.
    pub fn new(keys: DetachKeys) -> Self {
        Self { keys, held: 0 }
    }

    /// Something was typed.
    pub fn typed(&mut self, bytes: &[u8]) -> Typed {
        let keys = &self.keys.0;
        if keys.is_empty() {
            return Typed::Bytes(bytes.to_vec());
        }
        let mut through = Vec::with_capacity(bytes.len());
        for byte in bytes {
            // What is held and turns out to be something else goes through, from its front, until the rest of it and
            // this byte may again be the beginning of the sequence.
            while self.held > 0 && keys[self.held] != *byte {
                let rest = (1..=self.held).find(|shift| keys[*shift..self.held] == keys[..self.held - shift]);
                let shift = rest.expect("nothing at all is the beginning of any sequence");
                through.extend_from_slice(&keys[..shift]);
                self.held -= shift;
            }
            if keys[self.held] == *byte {
                self.held += 1;
            } else {
                through.push(*byte);
            }
            if self.held == keys.len() {
                return Typed::Detach(through);
            }
        }
        Typed::Bytes(through)
    }

    /// Whether keys are held back.
    pub fn is_holding(&self) -> bool {
        self.held > 0
    }

    /// The rest did not come in time: what was held back is for the command.
    pub fn release(&mut self) -> Vec<u8> {
        let held = std::mem::take(&mut self.held);
        self.keys.0[..held].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> DetachKeys {
        text.parse().expect("it is valid")
    }

    #[track_caller]
    fn check(sequence: &str, typed: &[&[u8]], through: &[u8], detached: bool) {
        let mut watch = Watch::new(keys(sequence));
        let mut all = Vec::new();
        for bytes in typed {
            match watch.typed(bytes) {
                Typed::Bytes(bytes) => all.extend(bytes),
                Typed::Detach(bytes) => {
                    all.extend(bytes);
                    assert_eq!((all.as_slice(), true), (through, detached));
                    return;
                }
            }
        }
        all.extend(watch.release());
        assert_eq!((all.as_slice(), false), (through, detached), "{typed:?}");
    }

    #[test]
    fn keys_are_written_as_in_other_tools() {
        assert_eq!(keys(DEFAULT), DetachKeys(vec![0x10, 0x11]));
        assert_eq!(keys("CTRL-],d").to_string(), "Ctrl-] d");
        assert_eq!(keys(DEFAULT).to_string(), "Ctrl-P Ctrl-Q");
        assert!(keys("none").is_none());
        for wrong in ["", "ctrl-", "ctrl-1", "ctrl-pp", "ab", "ä", "a,,b", " "] {
            assert!(wrong.parse::<DetachKeys>().is_err(), "{wrong:?}");
        }
        assert_eq!("a,a,a,a,a,a,a,a,a".parse::<DetachKeys>(), Err(BadKeys::TooMany));
    }

    #[test]
    fn the_sequence_detaches_however_it_is_cut() {
        check(DEFAULT, &[b"\x10\x11"], b"", true);
        check(DEFAULT, &[b"ls\r\x10", b"\x11"], b"ls\r", true);
        check("a,a,b", &[b"aaab"], b"a", true);
        check("a,b,a,c", &[b"ab", b"abac"], b"ab", true);
    }

    #[test]
    fn everything_else_goes_through_as_it_was_typed() {
        check(DEFAULT, &[b"\x10", b"x\x11"], b"\x10x\x11", false);
        check(DEFAULT, &[b"\x10\x10"], b"\x10\x10", false);
        check(DEFAULT, &[b"\x11\x10"], b"\x11\x10", false);
        check("a,b,a,c", &[b"ababab"], b"ababab", false);
        check("none", &[b"\x10\x11"], b"\x10\x11", false);
    }

    #[test]
    fn nothing_that_is_typed_is_lost_or_changed() {
        // Every text of these letters up to a length, cut in two anywhere, without the sequence in it.
        let watch = |text: &[u8], cut: usize| {
            let mut watch = Watch::new(keys("a,b,a,c"));
            let mut all = Vec::new();
            for part in [&text[..cut], &text[cut..]] {
                match watch.typed(part) {
                    Typed::Bytes(bytes) => all.extend(bytes),
                    Typed::Detach(bytes) => {
                        all.extend(bytes);
                        all.extend_from_slice(b"abac");
                        return (all, true);
                    }
                }
            }
            all.extend(watch.release());
            (all, false)
        };
        for number in 0..3u32.pow(7) {
            let text: Vec<u8> = (0..7).map(|at| b'a' + (number / 3u32.pow(at) % 3) as u8).collect();
            let found = text.windows(4).position(|window| window == b"abac");
            for cut in 0..=text.len() {
                let expected = found.map_or(text.len(), |at| at + 4);
                assert_eq!(watch(&text, cut), (text[..expected].to_vec(), found.is_some()));
            }
        }
    }
}
