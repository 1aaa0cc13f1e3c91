//! Pools: create, scale, rename, list and delete.

use http::Method;
use wire::api;

use crate::error::ClientError;
use crate::transport::Wait;
use crate::{Client, Repeat, in_query, json, plain};

fn path(name: &str) -> String {
    format!("/v1/pools/{}", in_query(name))
}

impl Client {
    /// Creates a pool. It fills in the background; [`Client::settled_pool`] waits for that.
    pub async fn create_pool(&self, wish: &api::CreatePool) -> Result<api::Pool, ClientError> {
        self.call(json(Method::POST, "/v1/pools".into(), wish), Repeat::Never).await
    }

    /// Lists all pools by name, without their waiting sandboxes.
    pub async fn pools(&self) -> Result<Vec<api::Pool>, ClientError> {
        let list: api::PoolList = self.read("/v1/pools".into()).await?;
        Ok(list.pools)
    }

    /// Returns a pool, with its waiting sandboxes.
    pub async fn pool(&self, name: &str) -> Result<api::Pool, ClientError> {
        self.read(path(name)).await
    }

    /// Waits until a pool is ready or failing, for at most this many seconds (up to 300), and returns it.
    pub async fn settled_pool(&self, name: &str, wait_seconds: u32) -> Result<api::Pool, ClientError> {
        let mut call = plain(Method::GET, format!("{}?wait_seconds={wait_seconds}", path(name)));
        call.wait = Wait::Forever;
        self.call(call, Repeat::Harmless).await
    }

    /// Scales or renames a pool.
    pub async fn update_pool(&self, name: &str, update: &api::UpdatePool) -> Result<api::Pool, ClientError> {
        self.call(json(Method::PATCH, path(name), update), Repeat::Never).await
    }

    /// Deletes a pool and its waiting sandboxes.
    pub async fn delete_pool(&self, name: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, path(name), Repeat::Never).await
    }
}
