//! Volumes: create, change, list, and read or write their files as tar streams.

use http::Method;
use wire::api;

use crate::error::ClientError;
use crate::files::{Download, Upload};
use crate::{Client, Repeat, in_query, json, plain};

fn path(name: &str) -> String {
    format!("/v1/volumes/{}", in_query(name))
}

impl Client {
    /// Creates a volume. It can be mounted when this call returns.
    pub async fn create_volume(&self, wish: &api::CreateVolume) -> Result<api::Volume, ClientError> {
        self.call(json(Method::POST, "/v1/volumes".into(), wish), Repeat::Never).await
    }

    /// Lists all volumes, sorted by name.
    pub async fn volumes(&self) -> Result<Vec<api::Volume>, ClientError> {
        let list: api::VolumeList = self.read("/v1/volumes".into()).await?;
        Ok(list.volumes)
    }

    /// Returns a volume, with its disk use.
    pub async fn volume(&self, name: &str) -> Result<api::Volume, ClientError> {
        self.read(path(name)).await
    }

    /// Changes the name or size of a volume.
    pub async fn update_volume(
        &self,
        name: &str,
        update: &api::UpdateVolume,
    ) -> Result<api::Volume, ClientError> {
        // After a rename, a second attempt would not find the old name.
        let repeat = if update.name.is_some() { Repeat::Never } else { Repeat::Harmless };
        self.call(json(Method::PATCH, path(name), update), repeat).await
    }

    /// Reads a directory or file of a volume as a tar stream.
    pub async fn export_volume(&self, name: &str, in_volume: &str) -> Result<Download, ClientError> {
        let target = format!("{}/tar?path={}", path(name), in_query(in_volume));
        self.download(plain(Method::GET, target)).await
    }

    /// Unpacks a tar stream into a directory of a volume.
    pub async fn import_volume(
        &self,
        name: &str,
        in_volume: &str,
        archive: Upload,
    ) -> Result<api::FilesMade, ClientError> {
        let target = format!("{}/tar?path={}", path(name), in_query(in_volume));
        self.upload(plain(Method::PUT, target), archive).await
    }

    /// Deletes a volume and all its files.
    pub async fn delete_volume(&self, name: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, path(name), Repeat::Never).await
    }
}
