//! Snapshots of sandboxes, and what is made from them: rollbacks, forks, history.

use http::Method;
use wire::{SandboxId, api};

use crate::error::ClientError;
use crate::files::{Download, Upload};
use crate::transport::Wait;
use crate::{Client, Repeat, in_query, json, plain};

fn path(snapshot: &str) -> String {
    format!("/v1/snapshots/{}", in_query(snapshot))
}

fn of(sandbox: SandboxId, what: &str) -> String {
    format!("/v1/sandboxes/{sandbox}/{what}")
}

impl Client {
    /// Takes a snapshot of a sandbox. If nothing has changed since the last one, returns that one.
    pub async fn take_snapshot(
        &self,
        sandbox: SandboxId,
        wish: &api::TakeSnapshot,
    ) -> Result<api::Snapshot, ClientError> {
        self.call(json(Method::POST, of(sandbox, "snapshots"), wish), Repeat::Never).await
    }

    /// Lists all snapshots, newest first.
    pub async fn snapshots(&self) -> Result<Vec<api::Snapshot>, ClientError> {
        let list: api::SnapshotList = self.read("/v1/snapshots".into()).await?;
        Ok(list.snapshots)
    }

    /// Returns a snapshot, by its id or name.
    pub async fn snapshot(&self, snapshot: &str) -> Result<api::Snapshot, ClientError> {
        self.read(path(snapshot)).await
    }

    /// Deletes a snapshot, by its id or name.
    pub async fn delete_snapshot(&self, snapshot: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, path(snapshot), Repeat::Never).await
    }

    /// Reads a snapshot as one OCI archive. With `include_usr`, also one over the image `host`.
    pub async fn export_snapshot(&self, snapshot: &str, include_usr: bool) -> Result<Download, ClientError> {
        let usr = if include_usr { "include" } else { "refuse" };
        let mut call = plain(Method::GET, format!("{}/export?usr={usr}", path(snapshot)));
        // All files are packed before the first byte comes.
        call.wait = Wait::Forever;
        self.download(call).await
    }

    /// Makes a snapshot of an OCI archive with one image. Returns when sandboxes can be made from it.
    pub async fn import_snapshot(
        &self,
        name: &str,
        labels: &[(String, String)],
        archive: Upload,
    ) -> Result<api::Snapshot, ClientError> {
        let mut target = format!("/v1/snapshots?name={}", in_query(name));
        for (key, value) in labels {
            target += &format!("&label={}", in_query(&format!("{key}={value}")));
        }
        let mut call = plain(Method::POST, target);
        call.wait = Wait::Forever;
        self.upload(call, archive).await
    }

    /// Replaces the files of a sandbox by those of a snapshot. Returns when the sandbox runs again.
    pub async fn rollback(&self, sandbox: SandboxId, snapshot: &str) -> Result<api::Sandbox, ClientError> {
        let wish = api::Rollback { snapshot: snapshot.to_owned() };
        self.call(json(Method::POST, of(sandbox, "rollback"), &wish), Repeat::Never).await
    }

    /// Creates children of a sandbox that begin with its files. Returns a sandbox or an error for each.
    pub async fn fork(
        &self,
        sandbox: SandboxId,
        wish: &api::Fork,
    ) -> Result<Vec<api::ForkedChild>, ClientError> {
        let forked: api::Forked =
            self.call(json(Method::POST, of(sandbox, "fork"), wish), Repeat::Never).await?;
        Ok(forked.children)
    }

    /// Deletes a sandbox and all that descend from it. Returns which were deleted.
    pub async fn delete_tree(&self, sandbox: SandboxId) -> Result<Vec<SandboxId>, ClientError> {
        let request = plain(Method::DELETE, of(sandbox, "tree"));
        let gone: api::DeletedTree = self.call(request, Repeat::Never).await?;
        Ok(gone.deleted)
    }

    /// Returns the family of a sandbox, or all families.
    pub async fn tree(&self, sandbox: Option<SandboxId>) -> Result<Vec<api::TreeMember>, ClientError> {
        let path = match sandbox {
            Some(sandbox) => of(sandbox, "tree"),
            None => "/v1/tree".into(),
        };
        let tree: api::Tree = self.read(path).await?;
        Ok(tree.members)
    }

    /// Compares two sandboxes or snapshots, by id or name.
    pub async fn diff(&self, a: &str, b: &str, content: bool) -> Result<api::Diff, ClientError> {
        self.read(format!("/v1/diff?a={}&b={}&content={content}", in_query(a), in_query(b))).await
    }

    /// Gives a child the name and the labels of its parent.
    pub async fn promote(
        &self,
        child: SandboxId,
        parent: api::PromoteParent,
    ) -> Result<api::Sandbox, ClientError> {
        let wish = api::Promote { parent: Some(parent) };
        self.call(json(Method::POST, of(child, "promote"), &wish), Repeat::Never).await
    }

    /// Lists the steps of a sandbox's history, newest first.
    pub async fn history(&self, sandbox: SandboxId) -> Result<Vec<api::HistoryStep>, ClientError> {
        let history: api::History = self.read(of(sandbox, "history")).await?;
        Ok(history.steps)
    }

    /// Goes back in a sandbox's history. Returns when the sandbox runs again.
    pub async fn undo(&self, sandbox: SandboxId, steps: u32) -> Result<api::Sandbox, ClientError> {
        let wish = api::Undo { steps: Some(steps) };
        self.call(json(Method::POST, of(sandbox, "undo"), &wish), Repeat::Never).await
    }
}
