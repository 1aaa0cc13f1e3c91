//! Environment variables for commands: from `-e`, and from files.

use std::path::PathBuf;

use anyhow::Context;

use crate::environment::Environment;
use crate::output::report::hinted;

/// A longer file is a mistake.
const FILE_MAX: u64 = 1024 * 1024;

/// All of them, in the order in which later ones win: files first, as they were named, then those of the command line.
pub fn collect(
    typed: Vec<(String, String)>,
    files: &[PathBuf],
    environment: &Environment,
) -> anyhow::Result<Vec<(String, String)>> {
    let mut all = Vec::new();
    for path in files {
        let shown = path.display();
        let about = std::fs::metadata(path).with_context(|| format!("cannot read `{shown}`"))?;
        if about.len() > FILE_MAX {
            return Err(hinted(
                format!("`{shown}` is longer than {FILE_MAX} bytes"),
                "is it the right file?",
            ));
        }
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read `{shown}`"))?;
        let own = |name: &str| environment.variable(name).and_then(|value| value.into_string().ok());
        let read = parse(&text, own).map_err(|line| {
            let hint = "write NAME=VALUE, NAME to pass on your own variable, or a comment that begins with #";
            hinted(format!("line {line} of `{shown}` is not a variable"), hint)
        })?;
        all.extend(read);
    }
    all.extend(typed);
    Ok(all)
}

/// The variables of a file, or the number of the first wrong line. A name alone takes the value that it has here, if any.
fn parse(text: &str, own: impl Fn(&str) -> Option<String>) -> Result<Vec<(String, String)>, usize> {
    let mut all = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim_start();
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, value) = match line.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (line.trim_end(), own(line.trim_end())),
        };
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(at + 1);
        }
        all.extend(value.map(|value| (name.to_owned(), value)));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_a_variable_per_line() {
        let own = |name: &str| (name == "HOME").then(|| "/root".to_owned());
        let read = parse("# tokens\n\nA=b=c\n  B=\nHOME\nUNSET\nC= d \n", own).expect("it is valid");
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(read, [pair("A", "b=c"), pair("B", ""), pair("HOME", "/root"), pair("C", " d ")]);
        for (text, line) in [("=x", 1), ("A=b\nnot a variable", 2), ("A B=c", 1)] {
            assert_eq!(parse(text, |_| None), Err(line), "{text}");
        }
    }
}
