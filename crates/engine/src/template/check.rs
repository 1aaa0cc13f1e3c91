//! The rules for the contents of a template. Pure.

use wire::launch::Limits;

use crate::SANDBOX_ENV_BYTES_MAX;
use crate::error::EngineError;
use crate::image::ImageName;
use crate::model::check::check_env;
use crate::model::defaults::{CPU_MILLIS_MIN, DISK_BYTES_MAX, DISK_BYTES_MIN, MEMORY_BYTES_MIN};
use crate::template::{LIMITS, TemplateSpec};
use crate::volume::check_mounts;

/// The longest path that the kernel takes, in bytes.
const PATH_MAX: usize = 4096;
/// Bytes of a user: twice the longest name in a passwd file.
const USER_MAX: usize = 256;
/// Bytes of the entry command with all its arguments.
const COMMAND_BYTES_MAX: usize = 128 * 1024;
/// The most memory that a row can hold, since rows hold signed numbers.
const MEMORY_BYTES_MAX: u64 = i64::MAX as u64;

/// Checks the contents of a template, and returns them in the spelling that rows keep.
pub(super) fn checked(mut spec: TemplateSpec) -> Result<TemplateSpec, EngineError> {
    let invalid = |what, why: String| Err(EngineError::Invalid { what, why });
    spec.image = ImageName::parse(&spec.image)?.canonical();
    check_limits(spec.cpu_millis, spec.memory_bytes)?;
    spec.disk_bytes.map(check_disk).transpose()?;
    check_env(&spec.env, SANDBOX_ENV_BYTES_MAX)?;
    if let Some(cwd) = &spec.cwd
        && (!cwd.starts_with('/') || cwd.len() > PATH_MAX || cwd.contains('\0'))
    {
        return invalid(
            "cwd",
            format!("it must be an absolute path of at most {PATH_MAX} bytes, got `{cwd:.128}`"),
        );
    }
    if let Some(user) = &spec.user
        && (!(1..=USER_MAX).contains(&user.len()) || user.contains('\0'))
    {
        return invalid(
            "user",
            format!("it must be a name or a number of 1 to {USER_MAX} bytes, got `{user:.128}`"),
        );
    }
    if spec.command.first().is_some_and(String::is_empty) {
        return invalid("command", "it names no program".into());
    }
    if spec.command.iter().any(|argument| argument.contains('\0')) {
        return invalid("command", "an argument contains a NUL byte".into());
    }
    let length: usize = spec.command.iter().map(|argument| argument.len() + 1).sum();
    if length > COMMAND_BYTES_MAX {
        return invalid("command", format!("it must have at most {COMMAND_BYTES_MAX} bytes, got {length}"));
    }
    spec.mounts = check_mounts(spec.mounts)?;
    Ok(spec)
}

/// Checks the limit of a sandbox's disk.
pub(crate) fn check_disk(disk_bytes: u64) -> Result<(), EngineError> {
    if disk_bytes < DISK_BYTES_MIN {
        let why = format!(
            "it must be at least {DISK_BYTES_MIN} bytes, got {disk_bytes}; was a unit such as `Gi` left out?"
        );
        return Err(EngineError::Invalid { what: "disk", why });
    }
    if disk_bytes > DISK_BYTES_MAX {
        return Err(EngineError::Invalid {
            what: "disk",
            why: format!("it must be at most {DISK_BYTES_MAX} bytes, got {disk_bytes}"),
        });
    }
    Ok(())
}

/// Checks the limits that a sandbox asks for. The key's quota and the machine's capacity are checked elsewhere.
pub(crate) fn check_limits(cpu_millis: u32, memory_bytes: u64) -> Result<(), EngineError> {
    if cpu_millis < CPU_MILLIS_MIN {
        let why =
            format!("it must be at least {CPU_MILLIS_MIN} thousandths of a processor, got {cpu_millis}");
        return Err(EngineError::Invalid { what: "cpu", why });
    }
    let invalid = |why| Err(EngineError::Invalid { what: "memory", why });
    if memory_bytes < MEMORY_BYTES_MIN {
        return invalid(format!(
            "it must be at least {MEMORY_BYTES_MIN} bytes, got {memory_bytes}; was a unit such as `Mi` left out?"
        ));
    }
    if memory_bytes > MEMORY_BYTES_MAX {
        return invalid(format!("it must be at most {MEMORY_BYTES_MAX} bytes, got {memory_bytes}"));
    }
    Ok(())
}

/// The limits of a sandbox of a template.
pub(crate) fn limits_of(spec: &TemplateSpec) -> Limits {
    let disk_bytes = spec.disk_bytes.or(LIMITS.disk_bytes);
    Limits { cpu_millis: spec.cpu_millis, memory_bytes: spec.memory_bytes, pids: LIMITS.pids, disk_bytes }
}
