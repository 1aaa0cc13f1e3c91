//! What to do about an error of the daemon, in words of the command line.
//!
//! Some of the daemon's own hints name HTTP requests, for people who write them. People who type a command get these hints
//! instead.

/// Words that help only people who write HTTP requests.
const HTTP_WORDS: [&str; 9] = ["/v1/", "GET ", "POST ", "PUT", "PATCH", "Bearer", "=true", "`user`", "route"];

/// Whether a hint is for those who write requests.
pub fn speaks_http(hint: &str) -> bool {
    HTTP_WORDS.iter().any(|word| hint.contains(word))
}

/// The hint for an error's stable code, where the command line has one of its own.
pub fn of_code(code: &str) -> Option<&'static str> {
    Some(match code {
        "sandbox_not_found" => "`shoal ls` lists all sandboxes",
        "command_not_found" => "`shoal ps -a SANDBOX` lists the commands of a sandbox",
        "template_not_found" => "`shoal template ls` lists all templates",
        "template_failed" => "fix the cause, then retry with `shoal template prepare --wait NAME`",
        "template_built_in" => "create a template with another name",
        "pool_not_found" => "`shoal pool ls` lists all pools",
        "pool_deleting" => "its sandboxes are still being deleted; `shoal pool ls` shows when it is gone",
        "pool_has_volumes" => "create a template without --mount for the pool",
        "volume_not_found" => "`shoal volume ls` lists all volumes",
        "secret_not_found" => "`shoal secret ls` lists all secrets, and `shoal secret set` keeps one",
        "key_not_found" => "`shoal key ls` lists all keys",
        "image_not_found" => "`shoal image ls` lists the images, and `shoal image pull` pulls others",
        "image_in_use" => "delete the sandboxes and templates that use it, or remove the name with --force",
        "alias_not_found" => "`shoal image alias ls` lists all aliases",
        "name_taken" => "choose another name, or delete the other one first",
        "unauthorized" => {
            "set SHOAL_API_KEY to a valid key; the daemon keeps its first key in `api.key` in its data directory"
        }
        "admin_required" => "use the key in `api.key` in the daemon's data directory",
        "stdin_closed" => "the command was started without stdin",
        "no_terminal" => "start the command with `shoal run -t` to give it a terminal",
        "disk_limits_not_supported" => {
            "leave out --disk, or give the daemon storage that has limits; `shoal doctor` says how"
        }
        "is_directory" => "`shoal cp` copies directories",
        "already_exists" => "remove it first, or choose another path",
        "permission_denied" => "choose another user with --user, or leave --user out to act as root",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_hint_speaks_of_http() {
        let codes = [
            "sandbox_not_found",
            "command_not_found",
            "template_not_found",
            "template_failed",
            "pool_not_found",
            "volume_not_found",
            "secret_not_found",
            "key_not_found",
            "image_not_found",
            "image_in_use",
            "alias_not_found",
            "name_taken",
            "unauthorized",
        ];
        for code in codes {
            let hint = of_code(code).unwrap_or_else(|| panic!("{code} has no hint"));
            assert!(!speaks_http(hint), "{code}: {hint}");
        }
        assert_eq!(of_code("disk_full"), None, "the daemon's own hint is right");
    }
}
