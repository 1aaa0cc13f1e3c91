//! One noun, one room: the folders of a crate depend on each other one way only.
//!
//! A room is a folder of `crates/<crate>/src`, with the file of its name beside it if there is one, or a file of its own
//! in `src`. `lib.rs` and `main.rs` are no rooms: they put the others together. A room depends on another when its
//! source has a path into it (`crate::b::C`, `super::b::C` where that leaves the room), or a path to something that the
//! crate's root has from there (`crate::C` with `pub use b::C` in `lib.rs`). Tests may look anywhere.
//!
//! Reads the source by itself: a parser for all of Rust takes longer to compile than the rest of this package.

mod graph;
mod source;
mod tokens;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use graph::{Graph, Place};
use source::{Reference, Source};

/// As many lines are shown for each dependency in a ring.
const PLACES_SHOWN: usize = 3;

/// What is wanted on the terminal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tell {
    /// What is wrong.
    Faults,
    /// Every room with what it depends on, and then what is wrong.
    Everything,
}

/// Fails when rooms of a crate depend on each other around a ring.
pub fn check(tell: Tell) -> Result<()> {
    let root = super::root();
    let mut crates = Vec::new();
    for directory in entries(&root.join("crates"))? {
        let name = file_name(&directory)?;
        let source = directory.join("src");
        if source.is_dir() {
            crates.push((name, read_crate(&root, &source)?));
        }
    }
    if tell == Tell::Everything {
        for (name, graph) in &crates {
            print!("{}", describe(name, graph));
        }
    }
    let faults = faults(&crates);
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(())
}

/// What is wrong with the rooms of all crates.
fn faults(crates: &[(String, Graph)]) -> Vec<String> {
    let mut faults = Vec::new();
    for (name, graph) in crates {
        let knots = graph.knots();
        if knots.is_empty() {
            continue;
        }
        let mut text = format!("rooms of crate `{name}` depend on each other");
        for ring in knots.iter().flat_map(|knot| graph.rings(knot)) {
            text.push_str(&describe_ring(graph, &ring));
        }
        faults.push(text);
    }
    faults
}

/// Each room of a ring with the lines that make it depend on the next.
fn describe_ring(graph: &Graph, ring: &[&str]) -> String {
    let mut text = String::new();
    for (at, from) in ring.iter().enumerate() {
        let to = ring[(at + 1) % ring.len()];
        let places = graph.places(from, to);
        let _ = write!(text, "\n  {}`{from}` needs `{to}`:", if at == 0 { "" } else { "  and " });
        for Place { file, line, text: source } in places.iter().take(PLACES_SHOWN) {
            let _ = write!(text, "\n      {file}:{line}: {source}");
        }
        if places.len() > PLACES_SHOWN {
            let _ = write!(text, "\n      and {} more lines", places.len() - PLACES_SHOWN);
        }
    }
    text
}

/// The rooms of a crate, each after what it depends on.
fn describe(name: &str, graph: &Graph) -> String {
    let knots = graph.knots();
    let mut text = format!("{name}\n");
    let width = graph.rooms().map(str::len).max().unwrap_or_default();
    for room in graph.in_order() {
        let needs: Vec<&str> = graph.needs(room).collect();
        let ring = if knots.iter().any(|knot| knot.rooms.contains(room)) { '*' } else { ' ' };
        let _ = writeln!(text, "{}", format!("  {ring} {room:width$}  {}", needs.join(" ")).trim_end());
    }
    for knot in &knots {
        let rooms = knot.rooms.len();
        let _ = writeln!(text, "  * {rooms} rooms in a knot of {} dependencies", knot.dependencies);
        for ring in graph.rings(knot) {
            text.push_str(describe_ring(graph, &ring).trim_start_matches('\n'));
            text.push('\n');
        }
    }
    text
}

/// The dependencies between the rooms below a folder `src`.
fn read_crate(root: &Path, directory: &Path) -> Result<Graph> {
    let mut files = Vec::new();
    collect(directory, &mut Vec::new(), &mut files)?;
    let mut sources = Vec::new();
    for (file, module) in files {
        let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let source = source::read(&text, &module);
        let file = file.strip_prefix(root).unwrap_or(&file).display().to_string();
        sources.push(File { file, module, text, source });
    }
    Ok(connect(&sources))
}

/// One source file, read.
struct File {
    file: String,
    module: Vec<String>,
    text: String,
    source: Source,
}

fn connect(files: &[File]) -> Graph {
    let for_tests: Vec<Vec<&String>> = files
        .iter()
        .flat_map(|file| {
            file.source.test_modules.iter().map(|name| file.module.iter().chain([name]).collect())
        })
        .collect();
    let is_for_tests = |file: &&File| {
        for_tests
            .iter()
            .any(|test| file.module.iter().zip(test).filter(|(a, b)| a == *b).count() == test.len())
    };
    let mut graph = Graph::default();
    for file in files.iter().filter(|file| !is_for_tests(file)) {
        if let Some(room) = file.module.first() {
            graph.add_room(room);
        }
    }
    let rooms: Vec<String> = graph.rooms().map(str::to_owned).collect();
    let of_root = Root::of(files, &rooms);
    for file in files.iter().filter(|file| !is_for_tests(file)) {
        let Some(from) = file.module.first() else { continue };
        for reference in &file.source.references {
            let Some(to) = of_root.room(reference) else { continue };
            if to != from {
                let text = file.text.lines().nth(reference.line - 1).unwrap_or_default().trim().to_owned();
                graph.add(from, to, Place { file: file.file.clone(), line: reference.line, text });
            }
        }
    }
    graph
}

/// What can be named at the crate's root, and from which room it comes.
struct Root<'a> {
    rooms: &'a [String],
    names: BTreeMap<&'a str, &'a str>,
}

impl<'a> Root<'a> {
    fn of(files: &'a [File], rooms: &'a [String]) -> Self {
        let mut names = BTreeMap::new();
        for reference in
            files.iter().filter(|file| file.module.is_empty()).flat_map(|file| &file.source.references)
        {
            let Some(room) =
                reference.path.first().and_then(|first| rooms.iter().find(|room| *room == first))
            else {
                continue;
            };
            match reference.name() {
                Some("*") => {
                    let module = &reference.path[..reference.path.len() - 1];
                    let exported = files.iter().filter(|file| file.module == module);
                    names.extend(
                        exported.flat_map(|file| public_names(&file.text)).map(|name| (name, room.as_str())),
                    );
                }
                Some(name) => {
                    names.insert(name, room.as_str());
                }
                None => {}
            }
        }
        Self { rooms, names }
    }

    fn room(&self, reference: &Reference) -> Option<&str> {
        let first = reference.path.first()?;
        let room = self.rooms.iter().find(|room| *room == first).map(String::as_str);
        room.or_else(|| self.names.get(first.as_str()).copied())
    }
}

/// What a module offers to those who import everything: items at the start of a line that are `pub`.
fn public_names(text: &str) -> impl Iterator<Item = &str> {
    const KINDS: &[&str] = &["struct", "enum", "fn", "trait", "type", "const", "static", "mod", "union"];
    text.lines().filter_map(|line| {
        let mut words = line.strip_prefix("pub")?.split([' ', '(', ')', '<', ':', ';', '{', '=']);
        words.find(|word| KINDS.contains(word))?;
        words.find(|word| !word.is_empty() && !KINDS.contains(word))
    })
}

/// All files below a folder, with the modules they are.
fn collect(
    directory: &Path,
    module: &mut Vec<String>,
    found: &mut Vec<(PathBuf, Vec<String>)>,
) -> Result<()> {
    for path in entries(directory)? {
        let name = file_name(&path)?;
        if path.is_dir() {
            // Programs of their own; they are no modules of this crate.
            if module.is_empty() && name == "bin" {
                continue;
            }
            module.push(name);
            collect(&path, module, found)?;
            module.pop();
        } else if let Some(stem) = name.strip_suffix(".rs") {
            let mut own = module.clone();
            let is_root = module.is_empty() && (stem == "lib" || stem == "main");
            if !is_root && stem != "mod" {
                own.push(stem.to_owned());
            }
            found.push((path, own));
        }
    }
    Ok(())
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let what = || format!("cannot read {}", directory.display());
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).with_context(what)? {
        paths.push(entry.with_context(what)?.path());
    }
    paths.sort();
    Ok(paths)
}

fn file_name(path: &Path) -> Result<String> {
    let name = path.file_name().and_then(|name| name.to_str());
    Ok(name.with_context(|| format!("{} has a name that is not text", path.display()))?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The graph of a crate with these files.
    fn graph(files: &[(&str, &str)]) -> Graph {
        let directory = std::env::temp_dir().join(format!("shoal-rooms-{}-{:p}", std::process::id(), files));
        for (path, text) in files {
            let path = directory.join(path);
            fs::create_dir_all(path.parent().expect("it is in the directory")).expect("it can be made");
            fs::write(path, text).expect("it can be written");
        }
        let graph = read_crate(&directory, &directory);
        fs::remove_dir_all(&directory).expect("it is ours");
        graph.expect("it can be read")
    }

    #[track_caller]
    fn check(files: &[(&str, &str)], expected: &[&str]) {
        let graph = graph(files);
        let found: Vec<String> = graph
            .rooms()
            .flat_map(|from| graph.needs(from).map(move |to| format!("{from} {to}")).collect::<Vec<_>>())
            .collect();
        assert_eq!(found, expected, "{files:?}");
    }

    #[test]
    fn a_folder_is_one_room_with_the_file_of_its_name() {
        check(
            &[("a.rs", "use crate::b;"), ("a/x.rs", "use crate::a::y; use super::y;"), ("b/mod.rs", "")],
            &["a b"],
        );
        check(&[("a/x/y.rs", "use super::super::super::b::C; use super::super::z;"), ("b.rs", "")], &["a b"]);
    }

    #[test]
    fn the_root_is_no_room_and_what_it_has_from_a_room_is_of_that_room() {
        let root =
            ("lib.rs", "mod a; mod b; mod c; pub use b::Thing as Other; use crate::c::*; pub struct Own;");
        let b = ("b.rs", "pub struct Thing;");
        let c = ("c.rs", "pub(crate) fn help() {}\npub struct Deep<T>(T);\nfn private() {}");
        check(&[root, ("a.rs", "use crate::Own;"), b, c], &[]);
        check(&[root, ("a.rs", "use crate::{Own, Other};"), b, c], &["a b"]);
        check(&[root, ("a.rs", "use super::help; fn f(x: crate::Deep<u8>) {}"), b, c], &["a c"]);
        check(&[root, ("a.rs", "use crate::private;"), b, c], &[]);
    }

    #[test]
    fn tests_may_look_anywhere() {
        let a = ("a/mod.rs", "#[cfg(test)] mod tests; use crate::b;");
        check(
            &[a, ("a/tests.rs", "use crate::c;"), ("b.rs", ""), ("c.rs", "use crate::a;")],
            &["a b", "c a"],
        );
        let root = ("lib.rs", "mod a; #[cfg(test)] mod help;");
        check(&[root, ("a.rs", ""), ("help.rs", "use crate::a;")], &[]);
    }

    #[test]
    fn programs_beside_the_crate_are_left_out() {
        check(&[("bin/tool.rs", "use crate::a;"), ("a.rs", "")], &[]);
    }

    #[test]
    fn a_pair_is_named_with_the_lines_that_make_it() {
        let tree = [("a.rs", "\nuse crate::b::{B, C};\n"), ("b/x.rs", "fn f() {\n    crate::a::g();\n}")];
        let faults = faults(&[("it".into(), graph(&tree))]);
        assert_eq!(
            faults,
            [
                "rooms of crate `it` depend on each other\n  `a` needs `b`:\n      a.rs:2: use crate::b::{B, C};\n    \
              and `b` needs `a`:\n      b/x.rs:2: crate::a::g();"
            ]
        );
    }
}
