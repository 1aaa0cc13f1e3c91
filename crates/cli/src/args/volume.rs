//! The arguments of `shoal volume`, and of mounts.

use clap::Args;
use client::api;

/// Make, change and list volumes: storage that outlives sandboxes and is mounted into them.
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
    Get(GetVolume),
    Ls(ListVolumes),
    Resize(ResizeVolume),
    Rename(RenameVolume),
    Rm(RemoveVolume),
    Cp(CopyVolume),
    Import(ImportVolume),
    Export(ExportVolume),
}

/// Make a volume.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume create data --size 5Gi
  shoal volume create try --from data          with the files that `data` has now; copies nothing")]
pub struct CreateVolume {
    /// What to call it
    pub name: String,
    /// What it may hold, as 512Mi or 5Gi [default: 1Gi, or as much as the one it is a copy of]
    #[arg(long)]
    pub size: Option<String>,
    /// Begin with the files of this volume
    #[arg(long, value_name = "VOLUME")]
    pub from: Option<String>,
    /// Print the volume as JSON
    #[arg(long)]
    pub json: bool,
}

/// Show a volume, how full it is and who mounts it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume get data\n  shoal volume get --json data | jq .used_bytes")]
pub struct GetVolume {
    /// Its name
    pub name: String,
    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

/// List volumes by name.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume ls\n  shoal volume ls --json | jq -r '.[].name'")]
pub struct ListVolumes {
    /// Print an array of objects
    #[arg(long)]
    pub json: bool,
}

/// Let a volume hold more, or less, though not less than is in it. Sandboxes that mount it go on.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume resize data 10Gi")]
pub struct ResizeVolume {
    /// Its name
    pub name: String,
    /// What it may hold, as 512Mi or 5Gi
    pub size: String,
    /// Print the volume as JSON
    #[arg(long)]
    pub json: bool,
}

/// Give a volume another name. Sandboxes that mount it go on; templates name volumes by name.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume rename data data-2024")]
pub struct RenameVolume {
    /// Its name
    pub name: String,
    /// Its new name
    pub new: String,
    /// Print the volume as JSON
    #[arg(long)]
    pub json: bool,
}

/// Delete volumes with all their files. Refused while sandboxes mount them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal volume rm data")]
pub struct RemoveVolume {
    /// Their names
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

/// Copy files and directories between this machine and a volume.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume cp ./set.csv data:/                   a file into the volume
  shoal volume cp ./models data:/models              a directory
  shoal volume cp data:/report.txt .
  shoal volume cp data:/a.txt data:/b.txt            within the volume

A sandbox that mounts the volume does it, and is deleted afterwards. A whole volume is copied by `shoal volume create --from`.")]
pub struct CopyVolume {
    /// A path of this machine, VOLUME:/path, or - for stdin
    pub from: String,
    /// A path of this machine, VOLUME:/path, or - for stdout
    pub to: String,
    /// Print what was copied as JSON
    #[arg(long)]
    pub json: bool,
}

/// Unpack a tar stream into a volume.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume import data < data.tar
  tar -C ./models -c . | shoal volume import data --path /models
  shoal volume import data -f data.tar")]
pub struct ImportVolume {
    /// Its name
    pub name: String,
    /// The directory of the volume that it is unpacked into; made if it is missing
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub path: String,
    /// Read this file and not stdin
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<std::path::PathBuf>,
    /// Print what was made as JSON
    #[arg(long)]
    pub json: bool,
}

/// Write a volume's files as a tar stream.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal volume export data > data.tar
  shoal volume export data --path /models | tar -t
  shoal volume export one | shoal volume import two")]
pub struct ExportVolume {
    /// Its name
    pub name: String,
    /// The directory or file of the volume that is packed
    #[arg(long, value_name = "PATH", default_value = "/")]
    pub path: String,
    /// Write this file and not stdout
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<std::path::PathBuf>,
}

/// `VOLUME:/path`, with `:ro` to look only. Names have no colon.
pub fn mount(text: &str) -> Result<api::VolumeMount, String> {
    let parts: Vec<&str> = text.split(':').collect();
    let (volume, path, read_only) = match parts.as_slice() {
        [volume, path] | [volume, path, "rw"] => (volume, path, false),
        [volume, path, "ro"] => (volume, path, true),
        _ => return Err("it is VOLUME:/path, or VOLUME:/path:ro".into()),
    };
    if volume.is_empty() || !path.starts_with('/') {
        return Err("it is VOLUME:/path, or VOLUME:/path:ro".into());
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
