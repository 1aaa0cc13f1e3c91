//! The arguments of all subcommands.

mod bench;
mod build;
mod command;
mod completions;
mod config;
mod copy;
mod dialects;
mod doctor;
mod forward;
mod image;
mod key;
mod launcher;
mod lifetime;
mod logs;
mod net;
mod pause;
mod pool;
mod ports;
mod run;
mod sandbox;
mod secret;
mod serve;
mod shell;
mod snapshot;
mod stats;
mod template;
mod top;
pub mod value;
mod version;
mod volume;
mod watch;
mod webhook;

use clap::Parser;

use crate::environment::Color;

pub use bench::{Bench, BenchFloor, BenchPart, FloorKind};
pub use build::Build;
pub use command::{Kill, Ps};
pub use completions::{CompleteNames, Completions, NameKind};
pub use config::{Config, ConfigAction, ShowConfig};
pub use copy::Copy;
pub use dialects::Dialects;
pub use doctor::Doctor;
pub use forward::{Forward, Mapping};
pub use image::{AliasAction, Image, ImageAction, ImportImage, ListImages, PullImage};
pub use key::{CreateKey, Key, KeyAction, ListKeys, RemoveKey};
pub use launcher::Launcher;
pub use lifetime::{Explain, Label, Lifetime, Touch};
pub use logs::Logs;
pub use net::{Net, NetAction, NetAllow, NetLog, NetSet, NetWatch};
pub use pause::{Pause, Resume};
pub use pool::{Pool, PoolAction};
pub use ports::{Ports, Url};
pub use run::{Exec, Manner, Run};
pub use sandbox::{Create, Inspect, List, Remove, Rename};
pub use secret::{Ledger, LedgerAction, RotateSecret, Secret, SecretAction, SetSecret};
pub use serve::{DaemonFlags, Serve};
pub use shell::{Attach, Shell};
pub use snapshot::{
    CreateSnapshot, Diff, ExportSnapshot, Fork, History, HostUsr, ImportSnapshot, ListSnapshots, Promote,
    Rollback, Snapshot, SnapshotAction, Tree, Undo,
};
pub use stats::Stats;
pub use template::{
    ApplyTemplates, CreateTemplate, PrepareTemplate, Template, TemplateAction, UpdateTemplate,
};
pub use top::{Top, TopSort};
pub use version::Version;
pub use volume::{CopyVolume, CreateVolume, ExportVolume, ImportVolume, Volume, VolumeAction};
pub use watch::Watch;
pub use webhook::{Webhook, WebhookAction};

/// Run sandboxes for AI agents on this machine.
#[derive(Debug, Parser)]
#[command(name = "shoal", version = server::version(), max_term_width = 100)]
#[command(after_help = "\
Examples:
  shoal run -- python3 -c 'print(2 + 2)'    run one command in its own sandbox
  shoal serve                               start a daemon
  shoal create --name work                  create a sandbox that stays
  shoal run --sandbox work -- ls -l         run a command in it
  shoal shell work                          open a shell in it

Environment:
  SHOAL_URL, SHOAL_API_KEY
      The daemon to talk to, and its key. Without them, `shoal` talks to the daemon of the data directory.
  SHOAL_DATA_DIR
      The data directory of the daemon on this machine. Without it, `shoal` uses the one that the configuration file \
      (/etc/shoal/config.toml) names, else /var/lib/shoal.
  SHOAL_REGISTRY_USERNAME, SHOAL_REGISTRY_PASSWORD
      Credentials for image registries, where no flag gives any. Without them, those in Docker's config.json.
  NO_COLOR, CLICOLOR=0, CLICOLOR_FORCE=1
      Turn colours off or on.

Exit codes:
  0      success
  1      failure; stderr says what failed, why, and what to do about it
  2      wrong command line
  125    `run`, `shell` and `attach`: Shoal failed; other codes are the command's own
  128+n  ended by signal n")]
pub struct Arguments {
    /// When to use colours
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
    #[command(subcommand)]
    pub subcommand: Subcommand,
}

#[derive(Debug, clap::Subcommand)]
pub enum Subcommand {
    Serve(Box<Serve>),
    Run(Box<Run>),
    Exec(Box<Exec>),
    Shell(Box<Shell>),
    Attach(Attach),
    Create(Box<Create>),
    #[command(visible_alias = "list")]
    Ls(List),
    #[command(alias = "show", alias = "get")]
    Inspect(Inspect),
    Rename(Rename),
    Label(Label),
    Lifetime(Lifetime),
    Touch(Touch),
    Explain(Explain),
    Pause(Pause),
    Resume(Resume),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(Remove),
    Snapshot(Snapshot),
    Rollback(Rollback),
    Fork(Fork),
    Tree(Tree),
    Diff(Diff),
    Promote(Promote),
    History(History),
    Undo(Undo),
    Ps(Ps),
    Kill(Kill),
    Cp(Copy),
    Logs(Logs),
    Watch(Watch),
    Webhook(Webhook),
    Ports(Ports),
    Url(Url),
    Forward(Forward),
    Stats(Stats),
    Top(Top),
    Image(Image),
    /// List images; the same as `shoal image ls`.
    Images(ListImages),
    Pull(PullImage),
    Template(Template),
    Volume(Volume),
    Secret(Secret),
    Ledger(Ledger),
    Pool(Pool),
    Net(Box<Net>),
    Build(Box<Build>),
    Key(Key),
    Config(Config),
    Dialects(Dialects),
    Doctor(Doctor),
    Bench(Bench),
    Completions(Completions),
    Version(Version),
    #[command(hide = true)]
    CompleteNames(CompleteNames),
    #[command(hide = true)]
    BenchFloor(BenchFloor),
    #[command(hide = true)]
    Launcher(Launcher),
    /// The process that carries what leaves sandboxes; the launcher starts it
    #[command(hide = true)]
    Egress,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    /// What a terminal has by default.
    const HELP_COLUMNS: usize = 80;

    fn parse(words: &[&str]) -> Result<Subcommand, clap::Error> {
        let words = std::iter::once("shoal").chain(words.iter().copied());
        Arguments::try_parse_from(words).map(|arguments| arguments.subcommand)
    }

    fn run(words: &[&str]) -> Run {
        match parse(words).expect("it is valid") {
            Subcommand::Run(run) => *run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn what_follows_the_program_belongs_to_it() {
        for words in [&["run", "--", "ls", "-l", "--json"][..], &["run", "ls", "-l", "--json"]] {
            let run = run(words);
            assert_eq!(run.command, ["ls", "-l", "--json"]);
            assert!(!run.manner.json);
        }
        assert_eq!(run(&["run", "--json", "--", "--", "x"]).command, ["--", "x"]);
    }

    #[test]
    fn variables_keep_their_equals_signs() {
        let run = run(&["run", "-e", "A=b=c", "--env", "B=", "-w", "/x", "-u", "nobody", "--", "true"]);
        assert_eq!(run.process.env, [("A".into(), "b=c".into()), ("B".into(), String::new())]);
        assert_eq!(
            (run.process.workdir.as_deref(), run.process.user.as_deref()),
            (Some("/x"), Some("nobody"))
        );
    }

    #[test]
    fn what_hands_type_by_habit_is_understood() {
        let exec = |words: &[&str]| match parse(words).expect("it is valid") {
            Subcommand::Exec(exec) => Run::from(*exec),
            other => panic!("{other:?}"),
        };
        let one = exec(&["exec", "-it", "work", "bash", "-l"]);
        assert!(one.manner.terminal && one.sandbox.as_deref() == Some("work"));
        assert_eq!(one.command, ["bash", "-l"]);
        assert_eq!(exec(&["exec", "work", "--", "ls", "--json"]).command, ["ls", "--json"]);
        assert!(exec(&["exec", "-d", "work", "sleep", "1"]).manner.background);
        let one = run(&["run", "--rm", "-it", "--cpus", "2", "--env-file", "x", "--", "sh"]);
        assert!(
            one.rm && one.manner.interactive && one.manner.terminal && one.spec.cpu.as_deref() == Some("2")
        );
        assert!(run(&["run", "-d", "--name", "web", "--", "true"]).manner.background);
        for (text, millis) in [("1s", 1000), ("10", 10_000), ("2m", 120_000)] {
            let timeout = run(&["run", "--timeout", text, "--", "true"]).manner.timeout;
            assert_eq!(timeout, Some(std::time::Duration::from_millis(millis)), "{text}");
        }
        for words in [
            &["ps"][..],
            &["ps", "-a", "work"],
            &["kill", "work"],
            &["kill", "-s", "TERM", "work", "x"],
            &["ls", "-q"],
            &["list"],
            &["rm", "--all"],
            &["rm", "-l", "app=chat"],
            &["rm", "-f", "work"],
            &["delete", "work"],
            &["rename", "work", "done"],
            &["create", "-n", "work"],
            &["logs", "--tail", "5", "work"],
            &["logs", "--since", "10m", "work"],
            &["serve", "-d"],
            &["images"],
            &["pull", "python:3.12"],
            &["version"],
        ] {
            parse(words).unwrap_or_else(|error| panic!("{words:?}: {error}"));
        }
    }

    #[test]
    fn mistakes_are_refused() {
        for words in [
            &["run"][..],
            &["run", "-e", "NOVALUE", "--", "true"],
            &["run", "-e", "=x", "--", "true"],
            &["run", "--timeout", "soon", "--", "true"],
            &["run", "-d", "-t", "--", "true"],
            &["run", "-d", "--rm", "--", "true"],
            &["exec", "work"],
            &["logs", "--since", "10m", "work", "cmd"],
            &["serve", "-d", "--detached"],
            &["rm", "--all", "work"],
            &["rm", "-l", "a=b", "work"],
            &["kill", "--all", "work", "x"],
            &["run", "--sandbox", "x", "--cpu", "1", "--", "true"],
            &["rm"],
            &["create", "--get-or-create"],
            &["create", "--label", "novalue"],
            &["create", "--idle", "soon"],
            &["lifetime", "x"],
            &["lifetime", "x", "--none", "--idle", "5m"],
            &["label", "x", "y"],
            &["key", "create"],
            &["serve", "--private", "/x", "--data-dir", "/y"],
            &["launcher", "--data-dir", "/x", "--installation", "../.."],
            &["frobnicate"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn every_subcommand_has_examples() {
        fn look(command: &clap::Command) {
            for below in command.get_subcommands() {
                if below.is_hide_set() || below.get_name() == "help" {
                    continue;
                }
                let after = below.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(after.contains("Examples:\n"), "`{}` has no examples", below.get_name());
                assert!(below.get_about().is_some(), "`{}` does not say what it does", below.get_name());
                look(below);
            }
        }
        look(&Arguments::command());
    }

    /// clap wraps help at the width of the terminal, so a paragraph is one line and nothing else is longer than that.
    #[test]
    fn help_is_not_wrapped_twice() {
        fn look(command: &clap::Command) {
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let mut previous = "";
            for line in after.lines() {
                let listed = line.starts_with(' ') || line.ends_with(':');
                assert!(
                    !line.starts_with("  shoal") || line.chars().count() <= HELP_COLUMNS,
                    "`{}`: an example does not fit {HELP_COLUMNS} columns: {line}",
                    command.get_name()
                );
                assert!(
                    listed || line.is_empty() || previous.is_empty(),
                    "`{}`: a paragraph has a line break in it: {previous}\n{line}",
                    command.get_name()
                );
                previous = if listed { "" } else { line };
            }
            command.get_subcommands().for_each(look);
        }
        look(&Arguments::command());
    }

    /// The words of a line as a shell would read them, up to a pipe, a redirection or the next command.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for character in line.chars() {
            match (quote, character) {
                (Some(open), close) if open == close => quote = None,
                (None, open @ ('\'' | '"')) => {
                    quote = Some(open);
                    word.get_or_insert_default();
                }
                (None, '|' | '>' | '<' | ';' | '&' | '#') => break,
                (None, space) if space.is_whitespace() => words.extend(word.take()),
                (_, character) => word.get_or_insert_default().push(character),
            }
        }
        words.extend(word);
        words
    }

    #[test]
    fn every_command_in_the_documents_is_one() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut documents = vec![root.join("README.md")];
        let mut directories = vec![root.join("docs")];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).expect("it is there") {
                let path = entry.expect("readable").path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.extension().is_some_and(|extension| extension == "md") {
                    documents.push(path);
                }
            }
        }
        let mut count = 0;
        for path in documents {
            let text = std::fs::read_to_string(&path).expect("text");
            // Every second piece between fences is a block.
            for block in text.split("```").skip(1).step_by(2) {
                let (kind, block) = block.split_once('\n').unwrap_or_default();
                for line in block.replace("\\\n", " ").lines() {
                    let line = match kind {
                        "sh" => line.trim(),
                        "console" => line.strip_prefix("$ ").unwrap_or_default(),
                        _ => "",
                    };
                    let words = words(line);
                    let Some((program, arguments)) = words.split_first() else { continue };
                    if program == "shoal" {
                        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                        // clap reports help and versions as errors.
                        if let Err(error) = parse(&arguments) {
                            assert_eq!(error.exit_code(), 0, "{}: `{line}`: {error}", path.display());
                        }
                        count += 1;
                    }
                }
            }
        }
        assert!(count > 10, "the documents have commands: {count}");
    }

    #[test]
    fn the_help_of_every_subcommand_has_not_drifted() {
        let mut all = String::new();
        let mut command = Arguments::command().term_width(100);
        command.build();
        write_help(&mut command, &mut all);
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.txt");
        if std::env::var_os("UPDATE_CLI_REFERENCE").is_some() {
            std::fs::write(&path, &all).expect("the reference can be written");
        }
        assert!(
            std::fs::read_to_string(&path).unwrap_or_default() == all,
            "docs/reference/cli.txt is not what the program says; look at what changed and update it with\n    \
             UPDATE_CLI_REFERENCE=1 cargo test -p shoal"
        );
    }

    fn write_help(command: &mut clap::Command, to: &mut String) {
        let help = command.render_long_help();
        to.push_str(&format!("## {}\n\n{help}\n", command.get_bin_name().unwrap_or("shoal")));
        for below in command.get_subcommands_mut() {
            if !below.is_hide_set() && below.get_name() != "help" {
                write_help(below, to);
            }
        }
    }
}
