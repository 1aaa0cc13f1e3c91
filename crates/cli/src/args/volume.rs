//! The arguments of `shoal volume`, and of mounts.

use clap::Args;
use client::api;

/// Manage volumes: storage that outlives sandboxes and is mounted into them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume create data --size 5Gi
  shoal create --name work --mount data:/data
  shoal create --name reader --mount data:/data:ro
  shoal volume cp ./set.csv data:/
  shoal volume ls")]
pub struct Volume {
    #[command(subcommand)]
    pub action: VolumeAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum VolumeAction {
    Create(CreateVolume),
    #[command(visible_alias = "inspect", alias = "show")]
    Get(GetVolume),
    #[command(visible_alias = "list")]
    Ls(ListVolumes),
    Resize(ResizeVolume),
    Rename(RenameVolume),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemoveVolume),
    Cp(CopyVolume),
    Import(ImportVolume),
    Export(ExportVolume),
}

/// Create a volume.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume create data --size 5Gi
  shoal volume create try --from data          a copy-on-write copy of `data`")]
pub struct CreateVolume {
    /// Name of the volume
    pub name: String,
    /// Size, for example 512Mi or 5Gi [default: 1Gi, or the size of the volume in --from]
    #[arg(long)]
    pub size: Option<String>,
    /// Start with the files of this volume
    #[arg(long, value_name = "VOLUME")]
    pub from: Option<String>,
    /// Print the volume as JSON
    #[arg(long)]
    pub json: bool,
}

/// Show a volume, its usage and the sandboxes that mount it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume get data\n  shoal volume get --json data | jq .used_bytes")]
pub struct GetVolume {
    /// Name of the volume
    pub name: String,
    /// Print the volume as JSON
    #[arg(long)]
    pub json: bool,
}

/// List volumes by name.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume ls\n  shoal volume ls --json | jq -r '.[].name'")]
pub struct ListVolumes {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Change the size of a volume, to no less than its files need. Sandboxes that mount it keep running.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume resize data 10Gi")]
pub struct ResizeVolume {
    /// Name of the volume
    pub name: String,
    /// The new size, for example 512Mi or 5Gi
    pub size: String,
    /// Print the volume as JSON
    #[arg(long)]
    pub json: bool,
}

/// Rename a volume. Sandboxes that mount it keep running; templates refer to volumes by name.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume rename data data-2024")]
pub struct RenameVolume {
    /// Name of the volume
    pub name: String,
    /// The new name
    pub new: String,
    /// Print the volume as JSON
    #[arg(long)]
    pub json: bool,
}

/// Delete volumes and all their files. Fails while sandboxes mount them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume rm data")]
pub struct RemoveVolume {
    /// Names of the volumes
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

/// Copy files and directories between this machine and a volume.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume cp ./set.csv data:/             a file into the volume
  shoal volume cp ./models data:/models        a directory
  shoal volume cp data:/report.txt .
  shoal volume cp data:/a.txt data:/b.txt      within the volume

A temporary sandbox mounts the volume for the copy. To copy a whole volume, use `shoal volume create --from`.")]
pub struct CopyVolume {
    /// A local path, VOLUME:/path, or `-` for stdin
    pub from: String,
    /// A local path, VOLUME:/path, or `-` for stdout
    pub to: String,
    /// Print the number of copied entries and bytes as JSON
    #[arg(long)]
    pub json: bool,
}

/// Unpack a tar archive into a volume.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume import data < data.tar
  tar -C ./models -c . | shoal volume import data --path /models
  shoal volume import data -f data.tar")]
pub struct ImportVolume {
    /// Name of the volume
    pub name: String,
    /// Unpack into this directory of the volume; created if missing
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub path: String,
    /// Read this file instead of stdin
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<std::path::PathBuf>,
    /// Print the number of unpacked entries and bytes as JSON
    #[arg(long)]
    pub json: bool,
}

/// Write a volume's files as a tar archive.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume export data > data.tar
  shoal volume export data --path /models | tar -t
  shoal volume export one | shoal volume import two")]
pub struct ExportVolume {
    /// Name of the volume
    pub name: String,
    /// Pack this directory or file of the volume
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub path: String,
    /// Write this file instead of stdout
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<std::path::PathBuf>,
}

/// `VOLUME:/path`, read-only with `:ro`. Names have no colon.
pub fn mount(text: &str) -> Result<api::VolumeMount, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let (volume, path, read_only) = match parts.as_slice() {
        [volume, path] | [volume, path, "rw"] => (volume, path, false),
        [volume, path, "ro"] => (volume, path, true),
        _ => return Err("write VOLUME:/path, or VOLUME:/path:ro for read-only".into()),
    };
    if volume.is_empty() || !path.starts_with('/') {
        return Err("write VOLUME:/path, or VOLUME:/path:ro for read-only".into());
    }
    Ok(api::VolumeMount { volume: (*volume).into(), path: (*path).into(), read_only })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read_from_the_command_line() {
        let data = |read_only| api::VolumeMount { volume: "data".into(), path: "/d".into(), read_only };
        assert_eq!(mount("data:/d"), Ok(data(false)));
        assert_eq!(mount("data:/d:rw"), Ok(data(false)));
        assert_eq!(mount("data:/d:ro"), Ok(data(true)));
        for text in ["", "data", "data:", ":/d", "data:d", "data:/d:rx", "a:/b:ro:ro"] {
            mount(text).expect_err(text);
        }
    }
}
