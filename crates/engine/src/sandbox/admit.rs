//! How a sandbox is created: the engine checks the request, reserves capacity and names, and starts a driver.
//!
//! Owns admission: create, get-or-create, idempotency, limits and names. `claim` hands out a sandbox that is ready in
//! a pool.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};

use tokio::sync::{mpsc, oneshot};
use wire::launch::{Access, Limits};
use wire::{BuildId, SandboxId};

use crate::Shared;
use crate::db::{GENERATION_FIRST, HookRows, LOCAL, SandboxRow, Stamps, Tally, Visibility};
use crate::guest::Use;
use crate::image::{Choice, ImageName, ImageRef, PullSpec};
use crate::model::check::digest;
use crate::model::defaults::made_up_name;
use crate::model::random::{random_u64, random_u128};
use crate::observe::clock::{Moment, Stamp, in_micros};
use crate::sandbox::claim::{Claiming, Unclaimed};
use crate::sandbox::deadlines::Deadlines;
use crate::sandbox::driver::{Birth, INBOX_MAX};
use crate::sandbox::lifecycle::Goal;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::registry::Registry;
use crate::template::{Origin as SnapshotOrigin, Preparation, Source, Version, limits_of};
use crate::volume::Mounted;
use crate::{
    Engine, EngineError, Field, GuestUser, HookPoint, Hooks, Key, Labels, Lifetime, NetworkPolicy, Notes,
    Origin, Owner, Program, Sandbox, SandboxName, SandboxSpec, State, TemplateName, VolumeMount, Wait,
};

/// How many random names to try for a sandbox without a name.
const NAME_ATTEMPTS: usize = 100;

/// How often to search by labels if each sandbox that is found ends before it is ready.
const FIND_ATTEMPTS: usize = 5;

impl Engine {
    /// Creates a sandbox within the limits of the caller's key. If the idempotency key was used before, returns the
    /// sandbox that the earlier request created.
    pub async fn create(&self, key: &Key, spec: SandboxSpec, wait: Wait) -> Result<Sandbox, EngineError> {
        let made = self.find_or_make(key, Visibility::Visible, None, spec, wait).await;
        made.map(|(sandbox, _)| sandbox)
    }

    /// Creates a sandbox for a step of a build. Callers cannot find this sandbox, but it counts against the owner's
    /// limits like any other.
    pub(crate) async fn create_for_build(
        &self,
        key: &Key,
        build: BuildId,
        spec: SandboxSpec,
    ) -> Result<Arc<LiveSandbox>, EngineError> {
        let (made, _) = self.find_or_make(key, Visibility::Build(build), None, spec, Wait::Ready).await?;
        let gone = || EngineError::SandboxNotFound { id: made.id.to_string() };
        self.shared().registry().get(made.id).ok_or_else(gone)
    }

    /// Returns the owner's oldest sandbox that has all of these labels, or creates one from `spec` with these labels
    /// added. Concurrent calls create only one sandbox. Finding a sandbox counts as a use. Sandboxes that have failed
    /// or are being deleted are not considered.
    pub async fn get_or_create(
        &self,
        key: &Key,
        labels: Labels,
        spec: SandboxSpec,
        wait: Wait,
    ) -> Result<(Sandbox, Origin), EngineError> {
        if labels.is_empty() {
            return Err(Field::MatchLabels.must("have at least one label, got none"));
        }
        let spec = SandboxSpec { labels: spec.labels.with(&labels)?, ..spec };
        self.find_or_make(key, Visibility::Visible, Some(labels), spec, wait).await
    }

    async fn find_or_make(
        &self,
        key: &Key,
        visibility: Visibility,
        find: Option<Labels>,
        spec: SandboxSpec,
        wait: Wait,
    ) -> Result<(Sandbox, Origin), EngineError> {
        check_pool_spec(&spec)?;
        self.check_history(spec.history.unwrap_or(0))?;
        if let Some(bytes) = spec.disk_bytes {
            self.check_disk_exists(bytes).await?;
        }
        let digest = request_digest(&spec, find.as_ref());
        let template = self.template_or_snapshot(&key.owner, spec.template).await?;
        let spec = SandboxSpec { template, ..spec };
        let request = Request { key, visibility, find, spec, digest, wait };
        // If the caller waits, the engine pulls the image here, so that a failed pull is reported before a sandbox
        // exists. If the caller does not wait, the driver pulls the image. The driver also pulls an image that was
        // removed right after the pull here.
        let mut missing = if wait == Wait::Ready { ImageMissing::Tell } else { ImageMissing::Pull };
        let mut attempts = FIND_ATTEMPTS;
        loop {
            attempts -= 1;
            match self.turn(&request, missing).await? {
                Turn::Over(sandbox, origin) => return Ok((*sandbox, origin)),
                Turn::Prepared | Turn::Lost => attempts = FIND_ATTEMPTS,
                Turn::Pulled => (missing, attempts) = (ImageMissing::Pull, FIND_ATTEMPTS),
                Turn::Raced(_) if attempts > 0 => {}
                Turn::Raced(error) => return Err(error),
            }
        }
    }

    /// Checks that a disk limit is not larger than the store.
    async fn check_disk_exists(&self, bytes: u64) -> Result<(), EngineError> {
        let backend = &self.shared().backend;
        if !backend.store().limits {
            return Ok(()); // Another error says so.
        }
        let most = backend.machine().await.map_err(|source| EngineError::Usage { source })?.disk_bytes;
        if bytes <= most {
            return Ok(());
        }
        Err(Field::Disk.must(format!("be at most {most} bytes, the size of the store, got {bytes}")))
    }

    /// One attempt: admits the request and waits for the result.
    async fn turn(&self, request: &Request<'_>, missing: ImageMissing) -> Result<Turn, EngineError> {
        let over = |live: &LiveSandbox, origin| Ok(Turn::Over(Box::new(live.describe()), origin));
        match self.admit(request, missing)? {
            Admitted::Unprepared(version) => {
                // However the preparation ends, the next attempt reports it.
                version.settled().await;
                Ok(Turn::Prepared)
            }
            Admitted::ImageMissing(reference) => {
                self.pull(request.key, PullSpec::new(reference)).finished().await?;
                Ok(Turn::Pulled)
            }
            Admitted::New(live, created) => {
                // The driver finishes the create even if this future is dropped.
                created.await.map_err(|_| EngineError::Stopping)??;
                over(&live, Origin::Made)
            }
            Admitted::Claimed(live, claimed) => match claimed.await.map_err(|_| EngineError::Stopping)? {
                Ok(()) => over(&live, Origin::Made),
                Err(Unclaimed::Broken) => Ok(Turn::Lost),
                Err(Unclaimed::Unwritten(error)) => Err(error),
            },
            Admitted::Claiming(claim) => {
                claim.over().await;
                Ok(Turn::Lost)
            }
            Admitted::Known(live) => {
                live.awaited(request.wait).await?;
                over(&live, Origin::Made)
            }
            Admitted::Found(live, _using) => match live.awaited(request.wait).await {
                Ok(()) => over(&live, Origin::Found),
                // The sandbox was deleted while it was being created, which does not make this request fail.
                Err(error @ EngineError::WrongState { .. }) => Ok(Turn::Raced(error)),
                Err(error) => Err(error),
            },
        }
    }

    /// Finds the sandbox that the request refers to. Otherwise checks and reserves capacity, name and idempotency key
    /// in one step, and starts the driver.
    fn admit(&self, request: &Request<'_>, missing: ImageMissing) -> Result<Admitted, EngineError> {
        let shared = self.shared();
        let Request { key, visibility, spec, digest, wait, .. } = request;
        let mut registry = shared.registry();
        if let Some(there) = already_there(&registry, request)? {
            return Ok(there);
        }
        let pool = spec.pool.as_ref().map(|pool| shared.pools.find(&key.owner, pool.as_str())).transpose()?;
        let template =
            pool.as_ref().map_or_else(|| spec.template.clone(), |pool| TemplateName::kept(&pool.template()));
        let spec = &SandboxSpec { template, ..spec.clone() };
        // Under the registry's lock, so that the template cannot be deleted before the new sandbox holds it.
        let source = shared.templates.find(&key.owner, spec.template.as_str())?;
        let basis = match basis(shared, &registry, &key.owner, source, spec, missing)? {
            Based::On(basis) => *basis,
            Based::Unprepared(version) => return Ok(Admitted::Unprepared(version)),
        };
        if let Some(claimed) = shared.claim(&mut registry, key, pool.as_ref(), spec, &basis, *digest)? {
            return Ok(claimed);
        }
        registry.check_room(&key.owner, &basis.limits, &key.limits, &shared.config.capacity)?;
        let name = match &spec.name {
            Some(name) if registry.name_is_free(&key.owner, name) => name.clone(),
            Some(name) => return Err(EngineError::NameTaken { name: name.to_string() }),
            None => free_name(&registry, &key.owner)?,
        };
        let rootfs = match basis.held.and_then(|image| shared.images.get(image)) {
            Some(image) => Some(image.rootfs()),
            None => shared.images.rootfs(&key.owner, &basis.choice.name),
        };
        if let (None, ImageMissing::Tell, ImageName::Reference(reference)) =
            (&rootfs, missing, &basis.choice.name)
        {
            return Ok(Admitted::ImageMissing(reference.clone()));
        }
        // A sandbox that the backend has ready brings its own id. Ready sandboxes have no volumes
        // and no snapshots.
        let ready = rootfs
            .filter(|_| basis.mounts.is_empty() && basis.origin.is_none())
            .and_then(|rootfs| shared.backend.reserve(&rootfs, &basis.limits));
        let newborn = Newborn {
            id: ready.unwrap_or_else(|| SandboxId::from_random(random_u128())),
            owner: key.owner.clone(),
            name,
            template: spec.template.to_string(),
        };
        let row = SandboxRow {
            visibility: *visibility,
            env: spec.env.pairs().clone(),
            idempotency_key: spec.idempotency_key.as_ref().map(|key| key.as_str().to_owned()),
            request_digest: *digest,
            notes: spec.notes.clone(),
            lifetime: spec.lifetime.clone(),
            ..newborn.row(&basis, shared.clock.now())
        };
        let (live, answer) = enter(shared, registry, row, basis.version, *wait);
        Ok(Admitted::New(live, answer))
    }
}

/// A create request, after the checks that need nothing but the request itself.
struct Request<'a> {
    key: &'a Key,
    visibility: Visibility,
    /// Search for a sandbox with these labels first.
    find: Option<Labels>,
    spec: SandboxSpec,
    digest: [u8; 32],
    wait: Wait,
}

/// The result of one attempt to admit a request.
enum Turn {
    Over(Box<Sandbox>, Origin),
    /// The preparation of the template has succeeded or failed.
    Prepared,
    /// The image is on this machine.
    Pulled,
    /// The ready sandbox broke, or another request's claim has ended. The next attempt finds a sandbox or creates
    /// one.
    Lost,
    /// Another request's sandbox ended while this request waited for it.
    Raced(EngineError),
}

/// The digest that distinguishes requests with the same idempotency key.
fn request_digest(spec: &SandboxSpec, find: Option<&Labels>) -> [u8; 32] {
    let rules = spec.lifetime.rules().iter();
    let asked = (
        spec.name.as_ref().map(SandboxName::as_str),
        spec.template.as_str(),
        &spec.image,
        spec.env.pairs(),
        spec.cpu_millis,
        spec.memory_bytes,
        spec.labels.pairs(),
        rules.map(|rule| (rule.since.word(), rule.after, rule.action.word())).collect::<Vec<_>>(),
        find.map(Labels::pairs),
    );
    // Fields that were added later are hashed only if the request sets them, so that the digests of older daemons
    // stay valid.
    let request = match &spec.pool {
        None => digest(&asked),
        Some(pool) => digest(&(asked, pool.as_str())),
    };
    let request = match (spec.disk_bytes, spec.mounts.as_slice()) {
        (None, []) => request,
        (disk_bytes, mounts) => digest(&(request, disk_bytes, mount_words(mounts))),
    };
    let request = match &spec.network {
        None => request,
        Some(policy) => digest(&(request, policy.words())),
    };
    let request = match spec.inject.as_slice() {
        [] => request,
        inject => digest(&(request, "inject", inject)),
    };
    let request = match spec.history {
        None | Some(0) => request,
        Some(history) => digest(&(request, "history", history)),
    };
    match spec.hooks.is_empty() {
        true => request,
        false => digest(&(request, "hooks", hook_words(&spec.hooks))),
    }
}

/// The sandbox that an earlier request with this idempotency key created, or one that has the requested labels.
fn already_there(registry: &Registry, request: &Request<'_>) -> Result<Option<Admitted>, EngineError> {
    let owner = &request.key.owner;
    if let Some(used) = &request.spec.idempotency_key
        && let Some(live) = registry.by_idempotency_key(owner, used.as_str())
    {
        return match live.identity().request_digest == request.digest {
            true => Ok(Some(Admitted::Known(live))),
            false => Err(EngineError::IdempotencyKeyReused),
        };
    }
    if let Some(used) = &request.spec.idempotency_key
        && let Some(claim) = registry.claim_by_idempotency_key(owner, used.as_str())
    {
        return match claim.request_digest == request.digest {
            true => Ok(Some(Admitted::Claiming(claim))),
            false => Err(EngineError::IdempotencyKeyReused),
        };
    }
    // A sandbox whose lifetime ends at this moment counts as gone: `Use::begin` returns `None` for it.
    let begin = |live: &Arc<LiveSandbox>| {
        Use::begin(&live.guest).map(|using| Admitted::Found(Arc::clone(live), using))
    };
    let Some(labels) = &request.find else { return Ok(None) };
    let claiming = || registry.claim_by_labels(owner, labels).map(Admitted::Claiming);
    Ok(registry.first_labelled(owner, labels, begin).or_else(claiming))
}

/// The identity of a new sandbox.
pub(crate) struct Newborn {
    pub id: SandboxId,
    pub owner: Owner,
    pub name: SandboxName,
    pub template: String,
}

impl Newborn {
    /// The row of the new sandbox, without the optional fields of a request.
    pub fn row(self, basis: &Basis, now: Moment) -> SandboxRow {
        let Self { id, owner, name, template } = self;
        let version = basis.version.as_ref();
        SandboxRow {
            id,
            incarnation: id,
            worker: LOCAL.into(),
            generation: GENERATION_FIRST,
            visibility: Visibility::Visible,
            owner,
            name,
            template,
            template_version: version.map(|version| (version.head.id, version.number)),
            image: basis.choice.name.canonical(),
            image_alias: basis.choice.alias.clone(),
            image_held: basis.held,
            limits: basis.limits,
            mounts: basis.mounts.iter().map(Mounted::row).collect(),
            env: BTreeMap::new(),
            state: State::Creating,
            goal: Goal::Running,
            reason: None,
            idempotency_key: None,
            request_digest: [0; 32],
            oom_kills: 0,
            created_at: in_micros(now.wall),
            labels: basis.labels.clone(),
            notes: Notes::default(),
            lifetime: Lifetime::default(),
            network: basis.network.clone(),
            stamps: Stamps::born(Stamp::of(now)),
            claimed_from: None,
            over: basis.origin.as_ref().map(|origin| origin.over.clone()).unwrap_or_default(),
            descent: basis.origin.as_ref().map(|origin| origin.descent),
            history: basis.history,
            hooks: HookRows {
                due: first_hook(&basis.hooks),
                hooks: basis.hooks.clone(),
                ..HookRows::default()
            },
        }
    }
}

/// The hook that is due in a new sandbox.
fn first_hook(hooks: &Hooks) -> Option<HookPoint> {
    hooks.at(HookPoint::AfterCreate).map(|_| HookPoint::AfterCreate)
}

/// Hooks in the form that goes into a digest.
fn hook_words(hooks: &Hooks) -> impl serde::Serialize + '_ {
    let all = hooks.all().iter().map(|(point, hook)| {
        let (script, argv) = match &hook.program {
            Program::Script(script) => (Some(script.as_str()), &[][..]),
            Program::Argv(argv) => (None, argv.words()),
            Program::Default => (None, &[][..]),
        };
        let (user, timeout) = (hook.user.as_ref().map(GuestUser::as_str), hook.timeout.as_millis());
        (point.word(), script, argv, user, timeout, hook.required)
    });
    all.collect::<Vec<_>>()
}

/// Adds a new sandbox to the registry and starts its driver. The caller has checked that capacity and name are free.
pub(crate) fn enter(
    shared: &Arc<Shared>,
    mut registry: MutexGuard<'_, Registry>,
    row: SandboxRow,
    version: Option<Arc<Version>>,
    wait: Wait,
) -> (Arc<LiveSandbox>, Created) {
    let deadlines = Deadlines::newborn(row.lifetime.clone(), shared.clock.now());
    let (inbox, messages) = mpsc::channel(INBOX_MAX);
    let live = LiveSandbox::new(Arc::clone(shared), &row, version, Tally::default(), inbox);
    registry.insert(&live);
    drop(registry);
    let (created, answer) = oneshot::channel();
    crate::sandbox::driver::spawn(
        &live,
        messages,
        deadlines,
        Birth::New { row: Box::new(row), wait, created },
    );
    (live, answer)
}

/// Resolves when the sandbox is created, or to the reason why it could not be.
pub(crate) type Created = oneshot::Receiver<Result<(), EngineError>>;

pub(crate) fn free_name(registry: &Registry, owner: &Owner) -> Result<SandboxName, EngineError> {
    (0..NAME_ATTEMPTS)
        .map(|_| made_up_name(random_u64()))
        .find(|name| registry.name_is_free(owner, name))
        .ok_or_else(|| EngineError::Full { what: "no free name was found".into() })
}

/// What a new sandbox is made from: the template's settings, overridden by those of the request.
pub(crate) fn basis(
    shared: &Shared,
    registry: &Registry,
    owner: &Owner,
    source: Source,
    spec: &SandboxSpec,
    missing: ImageMissing,
) -> Result<Based, EngineError> {
    let template = source.spec();
    let version = match source {
        Source::BuiltIn => None,
        Source::Version(version) => Some(version),
    };
    // An image of the request replaces the files of the template, those of its snapshot included.
    let origin = match (&spec.image, &version) {
        (None, Some(version)) => shared.templates.origin(version),
        _ => None,
    };
    let (choice, held) = match (&spec.image, &version) {
        (Some(image), _) => (shared.images.choose(image)?, None),
        (None, None) => (shared.images.choose(&template.image)?, None),
        (None, Some(version)) => match version.preparation() {
            Preparation::Ready(prepared) => {
                let name = ImageName::parse(&prepared.resolved)?;
                let is_alias = prepared.resolved != template.image;
                let alias = is_alias.then(|| crate::image::familiar(&template.image));
                (Choice { name, alias }, prepared.image)
            }
            Preparation::Failed { reason } => {
                return Err(EngineError::TemplateFailed { name: spec.template.to_string(), reason });
            }
            // If the version has just been replaced, the next attempt finds its successor.
            Preparation::Preparing | Preparation::Replaced if missing == ImageMissing::Tell => {
                return Ok(Based::Unprepared(Arc::clone(version)));
            }
            Preparation::Preparing | Preparation::Replaced => (shared.images.choose(&template.image)?, None),
        },
    };
    let own = limits_of(&template);
    let limits = Limits {
        cpu_millis: spec.cpu_millis.unwrap_or(own.cpu_millis),
        memory_bytes: spec.memory_bytes.unwrap_or(own.memory_bytes),
        disk_bytes: spec.disk_bytes.or(own.disk_bytes),
        ..own
    };
    crate::template::check_limits(limits.cpu_millis, limits.memory_bytes)?;
    if let Some(bytes) = spec.disk_bytes {
        crate::template::check_disk(bytes)?;
        if !shared.backend.store().limits {
            return Err(EngineError::DiskLimitsUnsupported);
        }
    }
    let limits = kept_limits(shared, limits);
    let labels = template.labels.with(&spec.labels)?;
    let mounts = crate::volume::merged(template.mounts, spec.mounts.clone());
    let mounts = shared.volumes.resolve(owner, mounts)?;
    let network = spec.network.clone().or(template.network).or_else(|| shared.config.network.default.clone());
    let network = network.unwrap_or_else(|| spec.network_default.clone()).with_inject(&spec.inject)?;
    for name in network.inject() {
        if !shared.secrets.has(owner, name) {
            return Err(EngineError::SecretNotFound { name: name.clone() });
        }
    }
    // Files of a snapshot may hold the placeholders of the sandbox that it was taken of.
    let network = match &origin {
        Some(origin) => {
            let parent = registry.get(origin.descent.parent);
            let first = parent.map(|parent| parent.view().network.family(parent.id));
            network.of_family(first.unwrap_or(origin.descent.parent))
        }
        None => network,
    };
    let history = spec.history.unwrap_or(template.history);
    if history > 0 && !shared.backend.store().kind.has_snapshots() {
        return Err(EngineError::SnapshotsUnsupported { what: "a history" });
    }
    let hooks = spec.hooks.clone().over(&template.hooks);
    let basis = Basis { version, choice, held, limits, labels, mounts, network, origin, history, hooks };
    Ok(Based::On(Box::new(basis)))
}

/// What to do with a create whose image is not on this machine.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageMissing {
    /// Admit nothing yet: report the missing image, so that the caller can pull it and try again.
    Tell,
    /// Admit the sandbox; its driver pulls the image.
    Pull,
}

/// What a new sandbox is made from.
pub(crate) struct Basis {
    pub version: Option<Arc<Version>>,
    pub choice: Choice,
    /// The digest of the image, if the template holds one.
    pub held: Option<::image::Digest>,
    pub limits: Limits,
    pub labels: Labels,
    pub mounts: Vec<Mounted>,
    pub network: NetworkPolicy,
    /// The snapshot that it starts from.
    pub origin: Option<SnapshotOrigin>,
    /// How many snapshots of its history are kept; 0 for none.
    pub history: u32,
    pub hooks: Hooks,
}

/// Drops limits that the backend cannot enforce, so that a sandbox shows only limits that apply.
pub(crate) fn kept_limits(shared: &Shared, limits: Limits) -> Limits {
    let disk_bytes = limits.disk_bytes.filter(|_| shared.backend.store().limits);
    Limits { disk_bytes, ..limits }
}

/// Mounts in the form that goes into a digest.
pub(crate) fn mount_words(mounts: &[VolumeMount]) -> Vec<(&str, &str, bool)> {
    let words = |mount: &VolumeMount| mount.access == Access::ReadOnly;
    mounts.iter().map(|mount| (mount.volume.as_str(), mount.path.as_str(), words(mount))).collect()
}

pub(crate) enum Based {
    On(Box<Basis>),
    /// The template is not ready yet.
    Unprepared(Arc<Version>),
}

pub(crate) enum Admitted {
    /// The template has to be prepared first.
    Unprepared(Arc<Version>),
    /// The image has to be pulled first.
    ImageMissing(ImageRef),
    New(Arc<LiveSandbox>, Created),
    /// The sandbox was ready in a pool and is being handed to the caller.
    Claimed(Arc<LiveSandbox>, oneshot::Receiver<Result<(), Unclaimed>>),
    /// Another request is claiming the sandbox that this request refers to.
    Claiming(Arc<Claiming>),
    /// The idempotency key was used before.
    Known(Arc<LiveSandbox>),
    /// The sandbox has the requested labels. The use keeps the sandbox alive for the caller.
    Found(Arc<LiveSandbox>, Use),
}

/// A request that names a pool cannot set image, limits or mounts, because the pool's sandboxes already exist.
pub(crate) fn check_pool_spec(spec: &SandboxSpec) -> Result<(), EngineError> {
    let limited = spec.cpu_millis.is_some() || spec.memory_bytes.is_some() || spec.disk_bytes.is_some();
    match &spec.pool {
        Some(_)
            if limited
                || spec.image.is_some()
                || !spec.mounts.is_empty()
                || spec.history.is_some()
                || !spec.hooks.is_empty() =>
        {
            let rule =
                "be given without image, limits, mounts, history and hooks: its sandboxes are made already";
            Err(Field::Pool.must(rule))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Action, Rule, SandboxEnv, Since};

    fn hex(bytes: [u8; 32]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Rows of running daemons hold these values. If a value changed, a retry across an upgrade would be rejected.
    #[test]
    fn the_digest_of_a_request_is_the_same_in_every_version() {
        let plain = request_digest(&SandboxSpec::default(), None);
        assert_eq!(hex(plain), "976b4fd192c4586008f1752762952815f1ca5d83870404c0b1e33e699ef67a99");
        let pair = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let rule = Rule { since: Since::LastUse, after: Duration::from_secs(60), action: Action::Delete };
        let spec = SandboxSpec {
            name: Some(SandboxName::parse("mine").expect("a name")),
            template: TemplateName::parse("t").expect("a name"),
            image: Some("docker.io/library/debian:12".into()),
            env: SandboxEnv::new(pair("A", "1")).expect("an environment"),
            cpu_millis: Some(500),
            memory_bytes: Some(256 << 20),
            labels: Labels::new(pair("k", "v")).expect("labels"),
            lifetime: Lifetime::new(vec![rule]).expect("a lifetime"),
            ..SandboxSpec::default()
        };
        let find = Labels::new(pair("thread", "42")).expect("labels");
        let full = request_digest(&spec, Some(&find));
        assert_eq!(hex(full), "063b56c37d14edffc28de4df414d47d361e01ecb798075c6359bb05e7c7b101f");
    }
}
