//! The dependencies between rooms, and the cycles in them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Names of rooms, and the dependencies of each with the lines that cause them.
#[derive(Debug, Default)]
pub struct Graph {
    edges: BTreeMap<String, BTreeMap<String, Vec<Place>>>,
}

/// A line of the source that makes one room depend on another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Path of the file, relative to the repository.
    pub file: String,
    pub line: usize,
    pub text: String,
}

/// Rooms of which each depends on all others, directly or indirectly.
#[derive(Debug, PartialEq, Eq)]
pub struct Knot {
    pub rooms: BTreeSet<String>,
    /// Number of dependencies between the rooms of the knot.
    pub dependencies: usize,
}

impl Graph {
    pub fn add_room(&mut self, room: &str) {
        self.edges.entry(room.to_owned()).or_default();
    }

    pub fn add(&mut self, from: &str, to: &str, place: Place) {
        self.add_room(to);
        let places = self.edges.entry(from.to_owned()).or_default().entry(to.to_owned()).or_default();
        // One line may name several items of one room.
        if places.last() != Some(&place) {
            places.push(place);
        }
    }

    pub fn rooms(&self) -> impl Iterator<Item = &str> {
        self.edges.keys().map(String::as_str)
    }

    pub fn needs<'a>(&'a self, room: &str) -> impl Iterator<Item = &'a str> {
        self.edges.get(room).into_iter().flat_map(|needs| needs.keys().map(String::as_str))
    }

    pub fn places(&self, from: &str, to: &str) -> &[Place] {
        self.edges.get(from).and_then(|needs| needs.get(to)).map_or(&[], Vec::as_slice)
    }

    /// All knots, in the order of their first room.
    pub fn knots(&self) -> Vec<Knot> {
        let reach: BTreeMap<&str, BTreeSet<&str>> =
            self.rooms().map(|room| (room, self.reach(room))).collect();
        let mut done = BTreeSet::new();
        let mut knots = Vec::new();
        for (room, reached) in &reach {
            if !reached.contains(room) || done.contains(room) {
                continue;
            }
            let rooms: BTreeSet<&str> =
                reached.iter().copied().filter(|other| reach[other].contains(room)).collect();
            let within = |from: &str| self.needs(from).filter(|to| rooms.contains(to)).count();
            let dependencies = rooms.iter().map(|from| within(from)).sum();
            done.extend(rooms.iter().copied());
            knots.push(Knot { rooms: rooms.into_iter().map(str::to_owned).collect(), dependencies });
        }
        knots
    }

    /// The dependencies of a room, direct and indirect.
    fn reach(&self, room: &str) -> BTreeSet<&str> {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&str> = self.needs(room).collect();
        while let Some(next) = open.pop() {
            if reached.insert(next) {
                open.extend(self.needs(next));
            }
        }
        reached
    }

    /// The cycles of a knot that show the problem: every pair of rooms that depend on each other, or the shortest
    /// cycle if there is no such pair.
    pub fn rings(&self, knot: &Knot) -> Vec<Vec<&str>> {
        let mut pairs = Vec::new();
        for from in self.rooms().filter(|room| knot.rooms.contains(*room)) {
            for to in self.needs(from).filter(|to| from < *to) {
                if self.needs(to).any(|back| back == from) {
                    pairs.push(vec![from, to]);
                }
            }
        }
        if !pairs.is_empty() {
            return pairs;
        }
        let rooms = self.rooms().filter(|room| knot.rooms.contains(*room));
        rooms.filter_map(|room| self.ring_through(room)).min_by_key(Vec::len).into_iter().collect()
    }

    /// The shortest cycle from a room back to it.
    fn ring_through<'a>(&'a self, room: &'a str) -> Option<Vec<&'a str>> {
        let mut before: BTreeMap<&str, &str> = BTreeMap::new();
        let mut open = VecDeque::from([room]);
        while let Some(here) = open.pop_front() {
            for next in self.needs(here) {
                if next == room {
                    let mut ring = vec![here];
                    while let Some(earlier) = before.get(ring[ring.len() - 1]) {
                        ring.push(earlier);
                    }
                    ring.reverse();
                    return Some(ring);
                }
                if !before.contains_key(next) {
                    before.insert(next, here);
                    open.push_back(next);
                }
            }
        }
        None
    }

    /// The rooms so that each comes after its dependencies, as far as there are no cycles. Rooms of one knot are
    /// adjacent.
    pub fn in_order(&self) -> Vec<&str> {
        let mut rooms: Vec<(usize, &str)> = self.rooms().map(|room| (self.reach(room).len(), room)).collect();
        rooms.sort_unstable();
        rooms.into_iter().map(|(_, room)| room).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &str)]) -> Graph {
        let mut graph = Graph::default();
        for (from, to) in edges {
            graph.add(from, to, Place { file: format!("{from}.rs"), line: 1, text: format!("use {to}") });
        }
        graph
    }

    #[track_caller]
    fn check(edges: &[(&str, &str)], knots: &[(&str, usize)], rings: &[&[&str]]) {
        let graph = graph(edges);
        let found = graph.knots();
        let told: Vec<(String, usize)> = found
            .iter()
            .map(|knot| (knot.rooms.iter().cloned().collect::<Vec<_>>().join(" "), knot.dependencies))
            .collect();
        let knots: Vec<(String, usize)> =
            knots.iter().map(|(rooms, count)| ((*rooms).into(), *count)).collect();
        assert_eq!(told, knots, "{edges:?}");
        let found: Vec<Vec<&str>> = found.iter().flat_map(|knot| graph.rings(knot)).collect();
        assert_eq!(found, rings, "{edges:?}");
    }

    #[test]
    fn a_graph_without_rings_has_no_knots() {
        check(&[("a", "b"), ("b", "c"), ("a", "c")], &[], &[]);
    }

    #[test]
    fn a_pair_is_a_knot() {
        check(&[("a", "b"), ("b", "a"), ("b", "c")], &[("a b", 2)], &[&["a", "b"]]);
    }

    #[test]
    fn a_ring_of_three_is_a_knot_and_is_named_in_its_order() {
        check(&[("a", "c"), ("c", "b"), ("b", "a")], &[("a b c", 3)], &[&["a", "c", "b"]]);
    }

    #[test]
    fn a_knot_names_all_its_pairs() {
        let edges = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "a"), ("d", "a")];
        check(&edges, &[("a b c", 5)], &[&["a", "b"], &["b", "c"]]);
    }

    #[test]
    fn two_knots_are_apart() {
        let edges = [("a", "b"), ("b", "a"), ("b", "x"), ("x", "y"), ("y", "x")];
        check(&edges, &[("a b", 2), ("x y", 2)], &[&["a", "b"], &["x", "y"]]);
    }

    #[test]
    fn rooms_come_after_what_they_need() {
        assert_eq!(graph(&[("a", "c"), ("c", "b")]).in_order(), ["b", "c", "a"]);
    }
}
