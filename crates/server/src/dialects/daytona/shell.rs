//! The two scripts behind a session: its shell, and what stands for one of its commands. Pure.
//!
//! The shell is a command of the engine that lives as long as the session and reads from a FIFO what to run. A command of the
//! session is a command of the engine too: it writes its text into a file, says so in the FIFO, and waits. The shell runs the text in
//! itself, so that directories, variables, functions and jobs stay, with the streams of the waiting process, which it opens through
//! `/proc`. So the output of each command is the engine's business, byte by byte, and `exit` has the code of the command that said it.
//!
//! ```text
//! command                                              shell
//! text > ID; mkfifo ID.end; "ID PID" > queue   ──▶     read ID PID < queue
//! read < ID.end                                ◀──     an empty line: the shell has the FIFO open, so its end is heard from now on
//! "queued" on stdout; a line on stream 6       ──▶     read < stream 6 of PID
//! read CODE < ID.end                           ◀──     . ID with the streams 3, 4 and 5 of PID; its code
//! read to the end of ID.end                    ◀──     closes it, or ends after `exit`
//! ```
//!
//! A command that calls `exit` ends only after the shell has ended, so a client that has its exit code finds the session
//! ended.
//!
//! The daemon waits for the word [`QUEUED`] before it answers, so that commands run in the order in which they were sent, and hides it
//! from every reader of the output.
//!
//! Both scripts are for `bash` and for the plain `sh` of images without it.

/// Says that the shell listens.
pub const READY: &str = "ready\n";

/// The first that a command says on stdout: it stands in the queue. Not part of its output.
pub const QUEUED: &str = "queued\n";

/// Below this, sessions have their directories.
const DIRECTORIES: &str = "/tmp/.daytona-";
const TEXT_BEGINS: &str = "\ntext='";
const TEXT_ENDS: &str = "'\n";

/// The directory of a session.
pub fn directory(shell: &str) -> String {
    format!("{DIRECTORIES}{shell}")
}

/// The script of a session's shell. `shell` is the id of the command that it is.
pub fn session(shell: &str) -> String {
    let directory = directory(shell);
    format!(
        r#"__daytona={directory} __daytona_id=
(umask 077; mkdir -p "$__daytona" && mkfifo "$__daytona/queue") || exit 1
exec 9<>"$__daytona/queue"
__daytona_end() {{
    __daytona_code=$?
    [ -z "$__daytona_id" ] || echo "$__daytona_code" >"$__daytona/$__daytona_id.end"
}}
trap __daytona_end EXIT
echo ready
while IFS=' ' read -r __daytona_id __daytona_pid <&9; do
    exec 8<>"$__daytona/$__daytona_id.end"
    echo >&8
    ! read -r __daytona_go 2>/dev/null <"/proc/$__daytona_pid/fd/6" || . "$__daytona/$__daytona_id" <"/proc/$__daytona_pid/fd/3" >"/proc/$__daytona_pid/fd/4" 2>"/proc/$__daytona_pid/fd/5" 8>&- 9>&-
    echo "$?" >&8
    exec 8>&-
    __daytona_id=
done
"#
    )
}

/// The script of a session's command. `nonce` keeps two commands with the same text apart.
pub fn command(shell: &str, number: u64, nonce: u64, text: &str) -> String {
    let directory = directory(shell);
    let quoted = text.replace('\'', r"'\''");
    format!(
        r#"# {nonce:016x}
directory={directory} id={number}{TEXT_BEGINS}{quoted}{TEXT_ENDS}(umask 077; printf '%s\n' "$text" >"$directory/$id" && mkfifo "$directory/$id.end" "$directory/$id.go") || exit 1
exec 3<&0 4>&1 5>&2 6<>"$directory/$id.go" 8<>"$directory/$id.end" 7<"$directory/$id.end"
echo "$id $$" >"$directory/queue"
echo queued
echo >&6
read -r begun <&7
exec 8>&-
read -r code <&7 || code=255
read -r rest <&7
exit "$code"
"#
    )
}

/// The text of a command that [`command`] wrote.
pub fn text_of(script: &str) -> Option<String> {
    let (_, rest) = script.split_once(TEXT_BEGINS)?;
    let (text, _) = rest.rsplit_once("'\n(umask 077;")?;
    Some(text.replace(r"'\''", "'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_command_reads_back() {
        for text in [
            "",
            "echo hi",
            "it's 'a' \"b\"\n(umask 077; x)",
            "text='\nx'",
            "cat <<'X'\n'\\''\nX\n",
            "ü\u{1f41f}",
        ] {
            let script = command("abc", 7, 9, text);
            assert_eq!(text_of(&script).as_deref(), Some(text), "{script}");
        }
        assert_ne!(command("abc", 7, 9, "x"), command("abc", 7, 10, "x"));
        assert_eq!(text_of("echo"), None);
    }
}
