//! The rules for the contents of a template. Pure.

use wire::launch::Limits;

use crate::error::{EngineError, Field};
use crate::image::ImageName;
use crate::model::check::check_history;
use crate::model::defaults::{CPU_MILLIS_MIN, DISK_BYTES_MAX, DISK_BYTES_MIN, MEMORY_BYTES_MIN};
use crate::template::{LIMITS, TemplateSpec};
use crate::volume::check_mounts;

/// The maximum size of the entry command with all its arguments, in bytes.
const COMMAND_BYTES_MAX: usize = 128 * 1024;
/// The most memory that a row can hold, since rows hold signed numbers.
const MEMORY_BYTES_MAX: u64 = i64::MAX as u64;

/// Checks the contents of a template, and returns them in the canonical form that rows keep.
pub(super) fn checked(mut spec: TemplateSpec) -> Result<TemplateSpec, EngineError> {
    spec.image = ImageName::parse(&spec.image)?.canonical();
    check_limits(spec.cpu_millis, spec.memory_bytes)?;
    spec.disk_bytes.map(check_disk).transpose()?;
    if let Some(command) = &spec.command {
        let length: usize = command.words().iter().map(|argument| argument.len() + 1).sum();
        if length > COMMAND_BYTES_MAX {
            return Err(Field::Command.must(format!("have at most {COMMAND_BYTES_MAX} bytes, got {length}")));
        }
    }
    spec.mounts = check_mounts(spec.mounts)?;
    check_history(spec.history)?;
    Ok(spec)
}

/// Checks the disk limit of a sandbox.
pub(crate) fn check_disk(disk_bytes: u64) -> Result<(), EngineError> {
    if disk_bytes < DISK_BYTES_MIN {
        let rule = format!(
            "be at least {DISK_BYTES_MIN} bytes, got {disk_bytes}; was a unit such as `Gi` left out?"
        );
        return Err(Field::Disk.must(rule));
    }
    if disk_bytes > DISK_BYTES_MAX {
        return Err(Field::Disk.must(format!("be at most {DISK_BYTES_MAX} bytes, got {disk_bytes}")));
    }
    Ok(())
}

/// Checks the limits that a sandbox asks for. The key's quota and the machine's capacity are checked elsewhere.
pub(crate) fn check_limits(cpu_millis: u32, memory_bytes: u64) -> Result<(), EngineError> {
    if cpu_millis < CPU_MILLIS_MIN {
        let rule = format!("be at least {CPU_MILLIS_MIN} thousandths of a processor, got {cpu_millis}");
        return Err(Field::Cpu.must(rule));
    }
    let invalid = |rule: String| Err(Field::Memory.must(rule));
    if memory_bytes < MEMORY_BYTES_MIN {
        return invalid(format!(
            "be at least {MEMORY_BYTES_MIN} bytes, got {memory_bytes}; was a unit such as `Mi` left out?"
        ));
    }
    if memory_bytes > MEMORY_BYTES_MAX {
        return invalid(format!("be at most {MEMORY_BYTES_MAX} bytes, got {memory_bytes}"));
    }
    Ok(())
}

/// The limits of a sandbox of a template.
pub(crate) fn limits_of(spec: &TemplateSpec) -> Limits {
    let disk_bytes = spec.disk_bytes.or(LIMITS.disk_bytes);
    Limits { cpu_millis: spec.cpu_millis, memory_bytes: spec.memory_bytes, pids: LIMITS.pids, disk_bytes }
}
