//! The rules for mounts of volumes in a sandbox. Pure.

use std::sync::Arc;

use wire::launch::{Access, MOUNTS_MAX, Mount};

use crate::db::MountRow;
use crate::error::{EngineError, Field, shown};
use crate::model::GuestPath;
use crate::volume::{LiveVolume, VolumeMount};

/// Directories that the sandbox itself needs. Nothing is mounted over them or below them.
const PROTECTED: [&str; 4] = ["/proc", "/sys", "/dev", "/run/shoal"];

/// A mount whose volume was found.
#[derive(Clone)]
pub(crate) struct Mounted {
    pub volume: Arc<LiveVolume>,
    pub path: String,
    pub access: Access,
}

impl Mounted {
    pub fn described(&self) -> VolumeMount {
        VolumeMount { volume: self.volume.name().to_string(), path: self.path.clone(), access: self.access }
    }

    pub fn row(&self) -> MountRow {
        MountRow { volume: self.volume.id, path: self.path.clone(), access: self.access }
    }

    pub fn plan(&self) -> Mount {
        Mount { volume: self.volume.id, path: self.path.clone(), access: self.access }
    }
}

/// Checks mounts: paths are absolute, without `.` and `..`, each used once, and outside the protected directories.
/// Returns the mounts with paths in canonical form, ordered so that no mount covers an earlier one.
pub(crate) fn check_mounts(mounts: Vec<VolumeMount>) -> Result<Vec<VolumeMount>, EngineError> {
    let invalid = |rule: String| Err(Field::Mounts.must(rule));
    if mounts.len() > MOUNTS_MAX {
        return invalid(format!("have at most {MOUNTS_MAX} entries, got {}", mounts.len()));
    }
    let mut checked: Vec<VolumeMount> = Vec::new();
    for VolumeMount { volume, path, access } in mounts {
        if volume.is_empty() {
            return invalid(format!("name a volume for `{}`", shown(&path)));
        }
        if let Err(must) = GuestPath::check(path.as_bytes()) {
            return invalid(format!("have a `path` that must {must}"));
        }
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        if parts.iter().any(|part| matches!(*part, "." | "..")) {
            return invalid(format!("have paths without `.` and `..`, got `{}`", shown(&path)));
        }
        let plain = format!("/{}", parts.join("/"));
        let below = |place: &str| plain == place || plain.starts_with(&format!("{place}/"));
        if plain == "/" || PROTECTED.iter().any(|place| below(place)) {
            return invalid(format!("not have a path over `{}`, which the sandbox needs", shown(&plain)));
        }
        if checked.iter().any(|mount| mount.path == plain) {
            return invalid(format!("have different paths, got `{}` twice", shown(&plain)));
        }
        checked.push(VolumeMount { volume, path: plain, access });
    }
    checked.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(checked)
}

/// The mounts of a template and of a request together. If both name a path, the request wins.
pub(crate) fn merged(template: Vec<VolumeMount>, request: Vec<VolumeMount>) -> Vec<VolumeMount> {
    let plain = |path: &str| path.split('/').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
    let taken: Vec<String> = request.iter().map(|mount| plain(&mount.path)).collect();
    let kept = template.into_iter().filter(|mount| !taken.contains(&plain(&mount.path)));
    kept.chain(request).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(path: &str) -> VolumeMount {
        VolumeMount { volume: "v".into(), path: path.into(), access: Access::ReadWrite }
    }

    #[track_caller]
    fn check_mount(paths: &[&str], expected: Result<&[&str], &str>) {
        let mounts = paths.iter().map(|path| mount(path)).collect();
        match (check_mounts(mounts), expected) {
            (Ok(mounts), Ok(expected)) => {
                let paths: Vec<&str> = mounts.iter().map(|mount| mount.path.as_str()).collect();
                assert_eq!(paths, expected);
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (result, _) => panic!("{paths:?}: {result:?}"),
        }
    }

    #[test]
    fn mounts_go_where_they_harm_nothing() {
        check_mount(
            &["/data/deeper/", "/data", "/process", "/home//a b"],
            Ok(&["/data", "/data/deeper", "/home/a b", "/process"]),
        );
        check_mount(&["data"], Err("must be an absolute path, got `data`"));
        check_mount(&["/"], Err("over `/`"));
        check_mount(&["//proc//"], Err("over `/proc`"));
        check_mount(&["/sys/fs/cgroup"], Err("over `/sys/fs/cgroup`"));
        check_mount(&["/dev/shm"], Err("over `/dev/shm`"));
        check_mount(&["/run/shoal/ca"], Err("over `/run/shoal/ca`"));
        check_mount(&["/data/../proc"], Err("`..`"));
        check_mount(&["/data", "/data/"], Err("got `/data` twice"));
    }

    #[test]
    fn what_a_request_mounts_wins_over_the_template() {
        let other = VolumeMount { volume: "other".into(), ..mount("/data/") };
        let both = merged(vec![mount("/data"), mount("/cache")], vec![other.clone()]);
        assert_eq!(both, [mount("/cache"), other]);
    }
}
