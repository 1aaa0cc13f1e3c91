//! `shoal completions`: a script for a shell, and the names that the script asks for while someone types.
//!
//! clap writes the part about commands and options. What is added here asks the daemon for names, with
//! `shoal complete-names`, where a sandbox, a template, a volume, a pool or an image is meant.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::{Arguments, CompleteNames, Completions, NameKind};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;

/// Subcommands that name one of these after them.
const SANDBOX_VERBS: &str = "shell attach exec inspect show get rename label lifetime touch explain rm delete remove logs watch stats ps kill ports url forward";
const TEMPLATE_VERBS: &str = "get inspect show update prepare rm delete remove";
const VOLUME_VERBS: &str = "get inspect show resize rename rm delete remove import export";
const POOL_VERBS: &str = "get inspect show scale rename rm delete remove";
const IMAGE_VERBS: &str = "inspect get show rm delete remove";

/// `shoal completions`
pub fn completions(arguments: &Completions) -> anyhow::Result<i32> {
    print::text(&script(arguments.shell)).map(|()| 0)
}

/// `shoal complete-names`: names to choose from, one per line. Without a daemon there are none, and that is no failure.
pub async fn names(arguments: CompleteNames, environment: &Environment) -> anyhow::Result<i32> {
    for name in known(arguments.kind, environment).await.unwrap_or_default() {
        if is_plain(&name) {
            print::line(&name)?;
        }
    }
    Ok(0)
}

async fn known(kind: NameKind, environment: &Environment) -> anyhow::Result<Vec<String>> {
    let client = find::daemon(environment)?;
    Ok(match kind {
        NameKind::Sandboxes => client.sandboxes().await?.into_iter().map(|sandbox| sandbox.name).collect(),
        NameKind::Templates => client.templates().await?.into_iter().map(|template| template.name).collect(),
        NameKind::Volumes => client.volumes().await?.into_iter().map(|volume| volume.name).collect(),
        NameKind::Pools => client.pools().await?.into_iter().map(|pool| pool.name).collect(),
        NameKind::Images => client.images().await?.into_iter().flat_map(|image| image.names).collect(),
    })
}

/// Bash expands what it completes from, so a name that a shell would read as more than a word is left out.
fn is_plain(name: &str) -> bool {
    let plain = |character: char| character.is_ascii_alphanumeric() || "._-:/@".contains(character);
    !name.is_empty() && !name.starts_with('-') && name.chars().all(plain)
}

fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "shoal", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        Shell::Bash => script + &bash(),
        Shell::Fish => script + &fish(),
        Shell::Zsh => zsh(&script),
        _ => script,
    }
}

fn bash() -> String {
    let any = |verbs: &str| verbs.replace(' ', "|");
    format!(
        r#"
_shoal_with_names() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" kind=""
    if [[ "$current" != -* ]]; then
        case "$previous" in
            --sandbox) kind=sandboxes ;;
            --template) kind=templates ;;
            --pool) kind=pools ;;
            --image) kind=images ;;
            -*) ;;
            *)
                case "$COMP_CWORD ${{COMP_WORDS[1]}} ${{COMP_WORDS[2]-}}" in
                    "1 "*|"2 template "*|"2 volume "*|"2 pool "*|"2 image "*) ;;
                    *)
                        case "${{COMP_WORDS[1]}}" in
                            {sandbox}) kind=sandboxes ;;
                            template) case "${{COMP_WORDS[2]}}" in {template}) kind=templates ;; esac ;;
                            volume) case "${{COMP_WORDS[2]}}" in {volume}) kind=volumes ;; esac ;;
                            pool) case "${{COMP_WORDS[2]}}" in {pool}) kind=pools ;; esac ;;
                            image) case "${{COMP_WORDS[2]}}" in {image}) kind=images ;; esac ;;
                        esac ;;
                esac ;;
        esac
    fi
    if [[ -n "$kind" ]]; then
        COMPREPLY=($(compgen -W "$(shoal complete-names "$kind" 2>/dev/null)" -- "$current"))
    else
        _shoal "$@"
    fi
}}
complete -F _shoal_with_names -o bashdefault -o default shoal
"#,
        sandbox = any(SANDBOX_VERBS),
        template = any(TEMPLATE_VERBS),
        volume = any(VOLUME_VERBS),
        pool = any(POOL_VERBS),
        image = any(IMAGE_VERBS),
    )
}

fn fish() -> String {
    let under = |noun: &str, verbs: &str, kind: &str| {
        format!(
            "complete -c shoal -n '__fish_seen_subcommand_from {noun}; and __fish_seen_subcommand_from {verbs}' -f -a '(shoal complete-names {kind} 2>/dev/null)'\n"
        )
    };
    let mut text = format!(
        "\ncomplete -c shoal -n 'not __fish_seen_subcommand_from template volume pool image key; and __fish_seen_subcommand_from {SANDBOX_VERBS}' -f -a '(shoal complete-names sandboxes 2>/dev/null)'\n"
    );
    text.push_str(&under("template", TEMPLATE_VERBS, "templates"));
    text.push_str(&under("volume", VOLUME_VERBS, "volumes"));
    text.push_str(&under("pool", POOL_VERBS, "pools"));
    text.push_str(&under("image", IMAGE_VERBS, "images"));
    for (option, kind) in
        [("sandbox", "sandboxes"), ("template", "templates"), ("pool", "pools"), ("image", "images")]
    {
        text.push_str(&format!(
            "complete -c shoal -l {option} -x -a '(shoal complete-names {kind} 2>/dev/null)'\n"
        ));
    }
    text
}

/// What clap completes as a file becomes a name, where the description says what is meant.
fn zsh(script: &str) -> String {
    const MEANT: [(&[&str], &str); 5] = [
        (&[":sandbox -- ", "::sandboxes -- ", ":SANDBOX:"], "sandboxes"),
        (&["Name of the template", "Names of the templates", ":TEMPLATE:"], "templates"),
        (&["Name of the volume", "Names of the volumes"], "volumes"),
        (&["Name of the pool", "Names of the pools", ":POOL:"], "pools"),
        (&[":image -- ", "::images -- ", ":IMAGE:"], "images"),
    ];
    let mut text = String::new();
    for line in script.lines() {
        let kind = MEANT.iter().find(|(marks, _)| marks.iter().any(|mark| line.contains(mark)));
        match kind {
            Some((_, kind)) => text.push_str(&line.replace(":_default'", &format!(":_shoal_{kind}'"))),
            None => text.push_str(line),
        }
        text.push('\n');
    }
    let mut functions = String::new();
    for (_, kind) in MEANT {
        functions.push_str(&format!(
            "_shoal_{kind}() {{\n    local -a names\n    names=(${{(f)\"$(shoal complete-names {kind} 2>/dev/null)\"}})\n    compadd -a names\n}}\n\n"
        ));
    }
    // The first line says what the file completes.
    match text.split_once('\n') {
        Some((first, rest)) => format!("{first}\n\n{functions}{rest}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_know_every_subcommand_and_ask_for_names() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell);
            for word in ["shell", "doctor", "detach-keys", "inspect", "shoal complete-names"] {
                assert!(script.contains(word), "{shell} does not know {word}");
            }
        }
        assert!(script(Shell::Zsh).contains(":_shoal_sandboxes'"));
    }

    #[test]
    fn a_name_that_a_shell_would_expand_is_left_out() {
        for name in ["work", "silver-spoon.2", "registry.example.com/a:1"] {
            assert!(is_plain(name), "{name}");
        }
        for name in ["", "-x", "$(reboot)", "a b", "`x`", "a;b", "*"] {
            assert!(!is_plain(name), "{name}");
        }
    }
}
