//! Reads and writes a header, one block of 512 bytes.

/// The size of a block.
pub const BLOCK: usize = 512;

/// The fields of a header that matter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    pub name: Vec<u8>,
    pub mode: u32,
    pub uid: u64,
    pub gid: u64,
    pub size: u64,
    pub modified: i64,
    pub kind: u8,
    pub link: Vec<u8>,
}

/// What is wrong with a header.
pub type Wrong = &'static str;

impl Header {
    /// Reads a block. Returns `None` for a block of zeroes, which marks the end.
    pub fn parse(block: &[u8; BLOCK]) -> Result<Option<Self>, Wrong> {
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let told = number(&block[148..156]).ok_or("its checksum is not a number")?;
        if told != i128::from(checksum(block)) {
            return Err("its checksum is wrong");
        }
        let mut name = until_nul(&block[..100]).to_vec();
        // Other formats use the bytes of the prefix for something else.
        if block[257..263] == *b"ustar\0" && block[345] != 0 {
            name = [until_nul(&block[345..500]), b"/", &name].concat();
        }
        let unsigned =
            |from: usize, to: usize| number(&block[from..to]).and_then(|number| u64::try_from(number).ok());
        let size = unsigned(124, 136).ok_or("its size is not a number")?;
        Ok(Some(Self {
            name,
            // Invalid permissions, owners and times are no reason to reject the contents.
            mode: unsigned(100, 108).unwrap_or(0o644) as u32 & 0o7777,
            uid: unsigned(108, 116).unwrap_or(0),
            gid: unsigned(116, 124).unwrap_or(0),
            size,
            modified: number(&block[136..148]).and_then(|number| i64::try_from(number).ok()).unwrap_or(0),
            kind: block[156],
            link: until_nul(&block[157..257]).to_vec(),
        }))
    }

    /// Writes a block. Name and link must fit: longer ones go into separate blocks before it.
    pub fn to_block(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        block[..self.name.len()].copy_from_slice(&self.name);
        put_number(&mut block[100..108], i128::from(self.mode));
        put_number(&mut block[108..116], i128::from(self.uid));
        put_number(&mut block[116..124], i128::from(self.gid));
        put_number(&mut block[124..136], i128::from(self.size));
        put_number(&mut block[136..148], i128::from(self.modified));
        block[156] = self.kind;
        block[157..157 + self.link.len()].copy_from_slice(&self.link);
        block[257..265].copy_from_slice(b"ustar  \0");
        let sum = format!("{:06o}\0 ", checksum(&block));
        block[148..156].copy_from_slice(sum.as_bytes());
        block
    }
}

/// The sum of all bytes, with the checksum field counted as spaces.
fn checksum(block: &[u8; BLOCK]) -> u32 {
    let bytes = block.iter().enumerate();
    bytes.map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u32::from(*byte) }).sum()
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Parses octal digits, or a big-endian number if the first bit is set.
fn number(field: &[u8]) -> Option<i128> {
    if field[0] & 0x80 != 0 {
        let negative = field[0] & 0x40 != 0;
        let first = i128::from(field[0] & 0x3f) - if negative { 0x40 } else { 0 };
        return Some(field[1..].iter().fold(first, |number, byte| (number << 8) | i128::from(*byte)));
    }
    let text = field.trim_ascii_start();
    let end = text.iter().position(|byte| matches!(byte, 0 | b' ')).unwrap_or(text.len());
    text[..end].iter().try_fold(0i128, |number, byte| match byte {
        b'0'..=b'7' => Some(number * 8 + i128::from(byte - b'0')),
        _ => None,
    })
}

fn put_number(field: &mut [u8], number: i128) {
    let digits = field.len() - 1;
    if (0..1 << (3 * digits)).contains(&number) {
        let text = format!("{number:0digits$o}");
        field[..digits].copy_from_slice(text.as_bytes());
        return;
    }
    let bytes = number.to_be_bytes();
    let length = field.len();
    field.copy_from_slice(&bytes[bytes.len() - length..]);
    field[0] = if number < 0 { 0xff } else { 0x80 };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_was_written_is_read_back(
            name in proptest::collection::vec(1u8.., 0..100), link in proptest::collection::vec(1u8.., 0..100),
            mode in 0u32..0o10000, uid in any::<u32>(), size in 0u64..1 << 62, modified in any::<i64>(),
        ) {
            let header =
                Header { name, mode, uid: uid.into(), gid: 5, size, modified, kind: b'0', link };
            prop_assert_eq!(Header::parse(&header.to_block()), Ok(Some(header)));
        }

        #[test]
        fn rubbish_is_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), BLOCK)) {
            let mut block: [u8; BLOCK] = bytes.try_into().expect("it has the length");
            let _ = Header::parse(&block);
            // With a correct sum, the other fields are checked.
            let sum = format!("{:06o}\0 ", checksum(&block));
            block[148..156].copy_from_slice(sum.as_bytes());
            let _ = Header::parse(&block);
        }
    }

    #[test]
    fn zeroes_are_the_end() {
        assert_eq!(Header::parse(&[0; BLOCK]), Ok(None));
    }

    #[test]
    fn a_negative_size_is_refused() {
        let header = Header {
            name: b"a".to_vec(),
            mode: 0,
            uid: 0,
            gid: 0,
            size: 0,
            modified: 0,
            kind: b'0',
            link: Vec::new(),
        };
        let mut block = header.to_block();
        put_number(&mut block[124..136], -1);
        let sum = format!("{:06o}\0 ", checksum(&block));
        block[148..156].copy_from_slice(sum.as_bytes());
        assert!(Header::parse(&block).is_err());
    }
}
