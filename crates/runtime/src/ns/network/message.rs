//! Netlink messages as bytes: headers, bodies, attributes. Pure; `netlink` sends them.

/// The kernel reads this message as a request.
pub(super) const REQUEST: u16 = 1;
/// The kernel confirms this message.
pub(super) const ACK: u16 = 4;
/// Replace an existing entry.
pub(super) const REPLACE: u16 = 0x100;
/// Fail if the entry exists.
pub(super) const EXCLUSIVE: u16 = 0x200;
/// Create the entry if it does not exist.
pub(super) const CREATE: u16 = 0x400;
/// List all.
pub(super) const DUMP: u16 = 0x300;
/// Append to the existing entries.
pub(super) const APPEND: u16 = 0x800;

/// An attribute that holds attributes.
const NESTED: u16 = 0x8000;
/// A header: length, kind, flags, number, sender.
const HEADER: usize = 16;

/// Several messages, to be sent in one write. They are numbered from 0.
#[derive(Default)]
pub(super) struct Messages {
    bytes: Vec<u8>,
    count: u32,
}

impl Messages {
    /// Adds a message and returns its number.
    pub fn push(&mut self, kind: u16, flags: u16, body: &[u8], attributes: &Attributes) -> u32 {
        let number = self.count;
        let length = HEADER + body.len() + attributes.0.len();
        self.bytes.extend((length as u32).to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend((flags | REQUEST).to_ne_bytes());
        self.bytes.extend(number.to_ne_bytes());
        self.bytes.extend(0_u32.to_ne_bytes());
        self.bytes.extend(body);
        self.bytes.extend(&attributes.0);
        pad(&mut self.bytes);
        self.count += 1;
        number
    }

    /// All of them.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.count
    }
}

/// Attributes, one after the other.
#[derive(Default, Clone)]
pub(super) struct Attributes(Vec<u8>);

impl Attributes {
    /// No attributes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Joins several lists.
    pub fn join(lists: &[Attributes]) -> Self {
        Self(lists.iter().flat_map(|list| &list.0).copied().collect())
    }

    /// Adds bytes.
    #[must_use]
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.0.extend(((4 + value.len()) as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        pad(&mut self.0);
        self
    }

    /// Adds a number in native byte order, as rtnetlink uses.
    #[must_use]
    pub fn native(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds a number in network byte order, as nf_tables uses.
    #[must_use]
    pub fn number(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_be_bytes())
    }

    /// Adds a text with its terminating zero.
    #[must_use]
    pub fn text(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(kind, &bytes)
    }

    /// Adds a list of attributes as one attribute.
    #[must_use]
    pub fn nest(self, kind: u16, inner: &Attributes) -> Self {
        self.bytes(kind | NESTED, &inner.0)
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// A message that was received.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Received<'a> {
    /// Its type.
    pub kind: u16,
    /// The number of the message that it answers.
    pub number: u32,
    /// What follows the header.
    pub body: &'a [u8],
}

/// The messages in the received bytes. Stops at a truncated message.
pub(super) fn received(mut bytes: &[u8]) -> impl Iterator<Item = Received<'_>> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let (header, body) = bytes.get(..length)?.split_at_checked(HEADER)?;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let number = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(Received { kind, number, body })
    })
}

/// The attributes in a body, each with its type. Stops at a truncated one.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, rest) = bytes.split_first_chunk()?;
        let length = usize::from(u16::from_ne_bytes(*length));
        let kind = u16::from_ne_bytes(*rest.first_chunk()?);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & !NESTED, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_padded_and_read_back() {
        let mut messages = Messages::default();
        let inner = Attributes::new().bytes(7, b"abc");
        let attributes_sent = Attributes::new().text(1, "lo").nest(2, &inner).number(3, 0x0102_0304);
        assert_eq!(messages.push(20, ACK, &[9; 8], &attributes_sent), 0);
        assert_eq!(messages.push(21, 0, &[8; 3], &Attributes::new()), 1);
        assert_eq!(messages.bytes().len() % 4, 0);
        let read: Vec<_> = received(messages.bytes()).collect();
        assert_eq!((read[0].kind, read[0].number, read[1].kind, read[1].number), (20, 0, 21, 1));
        assert_eq!(read[1].body, [8; 3]);
        let found: Vec<_> = attributes(&read[0].body[8..]).collect();
        assert_eq!(found[0], (1, &b"lo\0"[..]));
        assert_eq!(attributes(found[1].1).collect::<Vec<_>>(), [(7, &b"abc"[..])]);
        assert_eq!(found[2], (3, &[1, 2, 3, 4][..]));
    }

    #[test]
    fn what_is_cut_off_is_not_read() {
        let mut messages = Messages::default();
        messages.push(20, 0, &[1; 20], &Attributes::new().number(1, 1));
        let whole = messages.bytes();
        for length in 0..whole.len() {
            assert_eq!(received(&whole[..length]).count(), 0, "{length}");
        }
        assert_eq!(attributes(&[3, 0, 1, 0]).count(), 0, "shorter than its own header");
        assert_eq!(attributes(&[255, 255, 1, 0, 0]).count(), 0);
        assert_eq!(received(&[0; 16]).count(), 0, "a length of nothing does not repeat for ever");
    }
}
