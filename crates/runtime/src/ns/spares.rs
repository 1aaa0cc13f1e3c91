//! Keeps track of spares: sandboxes that are prepared before a caller asks for them. Decides, and does no work itself.
//!
//! A spare is a normal sandbox with a random id and no row yet. A create with the same *shape* (root filesystem and limits) takes a
//! spare together with its id, so nothing on the host is renamed, and `teardown(id)` removes it in any state. There is one shape
//! at a time: the one that was last asked for. `ns` creates and removes spares; a killed daemon leaves them as strays, which the
//! next daemon removes.

use std::collections::{HashMap, HashSet, VecDeque};

use wire::launch::{Limits, Rootfs};
use wire::{Digest, SandboxId};

/// What two sandboxes must have in common to be interchangeable before their first command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// What it sees as `/`.
    pub rootfs: Rootfs,
    /// What it may use.
    pub limits: Limits,
}

/// What a spare was made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    /// The shape that creates ask for.
    pub shape: Shape,
    /// The edition of what it was made from.
    edition: u64,
}

/// What a create finds under the id that it reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// A sandbox that is ready.
    Ready,
    /// A sandbox that does not fit any more and must be removed first.
    Unfit,
    /// Nothing.
    Nothing,
}

/// All spares of one backend.
#[derive(Debug)]
pub struct Spares {
    /// How many to keep ready.
    wanted: usize,
    shape: Option<Shape>,
    /// Requests for other shapes since the last one for this.
    misses: usize,
    ready: VecDeque<SandboxId>,
    /// Being made.
    making: HashSet<SandboxId>,
    /// Reserved by a create that has not claimed them yet.
    taken: HashMap<SandboxId, Made>,
    /// Counts how often what they are made from has changed.
    edition: u64,
    closed: bool,
}

impl Spares {
    /// Starts without spares; `wanted` are made once a shape is known.
    pub fn new(wanted: usize) -> Self {
        Self {
            wanted,
            shape: None,
            misses: 0,
            ready: VecDeque::new(),
            making: HashSet::new(),
            taken: HashMap::new(),
            edition: 0,
            closed: false,
        }
    }

    /// Takes a spare of this shape, if one is ready.
    pub fn take(&mut self, shape: &Shape) -> Option<SandboxId> {
        if self.shape.as_ref() != Some(shape) {
            self.misses += 1;
            return None;
        }
        self.misses = 0;
        let id = self.ready.pop_front()?;
        self.taken.insert(id, Made { shape: shape.clone(), edition: self.edition });
        Some(id)
    }

    /// Notes the shape that is likely to be asked for next. Returns the spares that do not fit it.
    ///
    /// One request for another shape does not discard the spares; as many requests as there are spares do.
    pub fn foresee(&mut self, shape: &Shape) -> Vec<SandboxId> {
        match &self.shape {
            Some(current) if current == shape || self.misses < self.wanted => Vec::new(),
            Some(_) | None => {
                self.misses = 0;
                self.shape = Some(shape.clone());
                self.ready.drain(..).collect()
            }
        }
    }

    /// Forgets the spares that are ready and returns them: what they were made from has changed.
    pub fn outdated(&mut self) -> Vec<SandboxId> {
        self.edition += 1;
        self.ready.drain(..).collect()
    }

    /// A layer is about to be removed. Returns the spares that use it, and forgets their shape.
    pub fn without(&mut self, layer: Digest) -> Vec<SandboxId> {
        let uses = |shape: &Shape| matches!(&shape.rootfs, Rootfs::Layers(layers) | Rootfs::OverHost(layers) if layers.contains(&layer));
        match self.shape.as_ref().is_some_and(uses) {
            true => {
                self.shape = None;
                self.outdated()
            }
            false => Vec::new(),
        }
    }

    /// What the next one is to be made from, if there are too few.
    pub fn next_rootfs(&self) -> Option<Rootfs> {
        self.shape.as_ref().filter(|_| self.lacks()).map(|shape| shape.rootfs.clone())
    }

    /// Whether there are too few.
    pub fn lacks(&self) -> bool {
        !self.closed && self.shape.is_some() && self.ready.len() + self.making.len() < self.wanted
    }

    /// What is to be made next under this id, unless there is enough.
    pub fn begin(&mut self, id: SandboxId) -> Option<Made> {
        let shape = self.shape.clone().filter(|_| self.lacks())?;
        self.making.insert(id);
        Some(Made { shape, edition: self.edition })
    }

    /// A spare was made. `false` if it does not fit any more and must be removed.
    pub fn made(&mut self, id: SandboxId, made: &Made) -> bool {
        let wanted = self.making.remove(&id)
            && !self.closed
            && self.edition == made.edition
            && self.shape.as_ref() == Some(&made.shape);
        if wanted {
            self.ready.push_back(id);
        }
        wanted
    }

    /// A spare could not be made, or is being removed.
    pub fn forget(&mut self, id: SandboxId) {
        self.making.remove(&id);
        self.taken.remove(&id);
        self.ready.retain(|ready| *ready != id);
    }

    /// A create claims the spare that it reserved.
    pub fn claim(&mut self, id: SandboxId, shape: &Shape) -> Claim {
        match self.taken.remove(&id) {
            Some(made) if made.shape == *shape && made.edition == self.edition => Claim::Ready,
            Some(_) => Claim::Unfit,
            None => Claim::Nothing,
        }
    }

    /// Stops making spares, and returns those that are ready.
    pub fn close(&mut self) -> Vec<SandboxId> {
        self.closed = true;
        self.ready.drain(..).collect()
    }

    /// Whether this is a known spare, which the sweep must not remove.
    pub fn holds(&self, id: SandboxId) -> bool {
        self.making.contains(&id) || self.taken.contains_key(&id) || self.ready.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(cpu_millis: u32) -> Shape {
        Shape {
            rootfs: Rootfs::Host,
            limits: Limits { cpu_millis, memory_bytes: 1 << 30, pids: 10, disk_bytes: None },
        }
    }

    fn id(number: u128) -> SandboxId {
        SandboxId::from_random(number)
    }

    /// Two spares of the shape 1 that are ready.
    fn two_ready() -> Spares {
        let mut spares = Spares::new(2);
        assert_eq!(spares.foresee(&shape(1)), []);
        for number in [1, 2] {
            let made = spares.begin(id(number)).expect("there are too few");
            assert!(spares.made(id(number), &made));
        }
        assert_eq!(spares.begin(id(3)), None, "two are enough");
        spares
    }

    #[test]
    fn each_is_given_once_and_replaced() {
        let mut spares = two_ready();
        assert_eq!(spares.take(&shape(1)), Some(id(1)));
        assert_eq!(spares.take(&shape(1)), Some(id(2)));
        assert_eq!(spares.take(&shape(1)), None);
        assert!(spares.begin(id(3)).is_some());
        assert_eq!(spares.claim(id(1), &shape(1)), Claim::Ready);
        assert_eq!(spares.claim(id(1), &shape(1)), Claim::Nothing, "it is claimed already");
        assert_eq!(spares.claim(id(9), &shape(1)), Claim::Nothing, "it was never a spare");
    }

    #[test]
    fn nothing_is_made_before_a_shape_is_known_or_after_the_end() {
        let mut spares = Spares::new(2);
        assert_eq!(spares.begin(id(1)), None);
        let mut spares = two_ready();
        assert_eq!(spares.close(), [id(1), id(2)]);
        assert_eq!(spares.begin(id(3)), None);
    }

    #[test]
    fn another_shape_takes_over_when_it_is_asked_for_as_often_as_there_are_spares() {
        let mut spares = two_ready();
        assert_eq!(spares.take(&shape(2)), None);
        assert_eq!(spares.foresee(&shape(2)), [], "once may be chance");
        assert_eq!(spares.take(&shape(2)), None);
        assert_eq!(spares.foresee(&shape(2)), [id(1), id(2)], "twice is not");
        assert_eq!(spares.begin(id(3)).map(|made| made.shape), Some(shape(2)));
    }

    #[test]
    fn one_that_was_begun_under_another_shape_is_not_kept() {
        let mut spares = Spares::new(1);
        spares.foresee(&shape(1));
        let begun = spares.begin(id(1)).expect("there is none");
        assert_eq!(spares.take(&shape(2)), None);
        spares.foresee(&shape(2));
        assert!(!spares.made(id(1), &begun));
        assert!(!spares.holds(id(1)));
    }

    #[test]
    fn nothing_of_an_older_edition_is_used() {
        let mut spares = two_ready();
        assert_eq!(spares.take(&shape(1)), Some(id(1)));
        let begun = spares.begin(id(3)).expect("one was taken");
        assert_eq!(spares.outdated(), [id(2)]);
        assert_eq!(spares.claim(id(1), &shape(1)), Claim::Unfit);
        assert!(!spares.made(id(3), &begun));
        assert!(spares.begin(id(4)).is_some());
    }

    #[test]
    fn a_layer_that_goes_takes_the_spares_that_are_made_from_it_along() {
        let layer = Digest::from_bytes([7; 32]);
        let layered = Shape { rootfs: Rootfs::Layers(vec![layer]), ..shape(1) };
        let mut spares = Spares::new(1);
        spares.foresee(&layered);
        let made = spares.begin(id(1)).expect("there is none");
        assert!(spares.made(id(1), &made));
        assert_eq!(spares.without(Digest::from_bytes([8; 32])), []);
        assert_eq!(spares.without(layer), [id(1)]);
        assert_eq!(spares.begin(id(2)), None, "its image is gone");
        assert_eq!(two_ready().without(layer), []);
    }

    #[test]
    fn all_that_nobody_owns_is_held_until_it_is_claimed_or_forgotten() {
        let mut spares = two_ready();
        spares.take(&shape(1));
        spares.begin(id(3));
        for number in [1, 2, 3] {
            assert!(spares.holds(id(number)), "{number}");
        }
        assert_eq!(spares.claim(id(1), &shape(1)), Claim::Ready);
        assert!(!spares.holds(id(1)), "it has a row now");
        spares.forget(id(2));
        assert_eq!(spares.take(&shape(1)), None);
        spares.forget(id(3));
        assert!(!spares.holds(id(3)));
    }
}
