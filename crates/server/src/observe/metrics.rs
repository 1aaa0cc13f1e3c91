//! What the daemon counts, as OpenMetrics text at `/metrics`.
//!
//! Owns the registry, what HTTP and the process itself add to it; what the engine counts is its own business. Labels are route
//! templates, methods, status codes and error codes, never what a caller wrote.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::{Method, StatusCode};
use engine::{Engine, MachineStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

/// What the answer is called; the version that the text follows.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Until the answer begins: from half a millisecond to a minute, which a request that waits for a command may well take.
const DURATIONS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0];
/// Begins the name of everything that is Shoal's own.
const PREFIX: &str = "shoal";
/// What a request to no route is counted under.
const NO_ROUTE: &str = "none";
/// In `/proc`, times are in hundredths of a second on every machine that Linux shows them on.
const TICKS_PER_SECOND: f64 = 100.0;

/// The registry, and what is counted outside the engine.
pub struct Metrics {
    registry: Registry,
    requests: Family<Request, Counter>,
    durations: Family<Route, Histogram, fn() -> Histogram>,
    errors: Family<ErrorCode, Counter>,
    streams: Gauge,
    machine: Arc<Mutex<Option<MachineStats>>>,
    /// By route, so that a request to one that was seen before costs a look and two additions. Bounded by the router: a
    /// route's template comes from there, never from a caller.
    meters: RwLock<HashMap<&'static str, Arc<[OnceLock<Meter>; METHODS.len()]>>>,
}

/// What is counted of one method of one route.
struct Meter {
    route: &'static str,
    method: &'static str,
    duration: Histogram,
    /// By hundreds of the status.
    statuses: [OnceLock<Counter>; 6],
}

/// Methods that any route knows; others count as `OTHER`.
const METHODS: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OTHER"];
const STATUSES: [&str; 6] = ["other", "1xx", "2xx", "3xx", "4xx", "5xx"];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    route: &'static str,
    method: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    route: &'static str,
    method: &'static str,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ErrorCode {
    code: String,
}

impl Metrics {
    /// Everything that an engine and the server in front of it count.
    pub fn new(engine: &Engine) -> Self {
        let mut registry = Registry::default();
        // Named as every Prometheus client names them, so that dashboards made for others show them.
        registry.register_collector(Box::new(ProcessFigures));
        let own = registry.sub_registry_with_prefix(PREFIX);
        engine.register_metrics(own);
        let requests = Family::default();
        let durations: Family<Route, Histogram, fn() -> Histogram> =
            Family::new_with_constructor(|| Histogram::new(DURATIONS));
        let errors = Family::default();
        let streams = Gauge::default();
        let machine = Arc::default();
        own.register("http_requests", "Requests, by route, method and kind of status", requests.clone());
        own.register_with_unit(
            "http_request_duration",
            "How long it took until the answer began, by route and method",
            Unit::Seconds,
            durations.clone(),
        );
        own.register("errors", "Refusals and failures, by the code in their body", errors.clone());
        own.register("streams_open", "Streams and long requests that are open", streams.clone());
        own.register("build", "What runs", Info::new(vec![("version", crate::version())]));
        own.register_collector(Box::new(MachineFigures(Arc::clone(&machine))));
        Self { registry, requests, durations, errors, streams, machine, meters: RwLock::default() }
    }

    /// A request was answered.
    pub fn answered(&self, route: Option<&str>, method: &Method, status: StatusCode, took: Duration) {
        let (route, methods) = self.meters_of(route.unwrap_or(NO_ROUTE));
        let at = METHODS.iter().position(|known| *known == method.as_str()).unwrap_or(METHODS.len() - 1);
        let meter = methods[at].get_or_init(|| {
            let labels = Route { route, method: METHODS[at] };
            let duration = self.durations.get_or_create(&labels).clone();
            Meter { route, method: METHODS[at], duration, statuses: Default::default() }
        });
        meter.duration.observe(took.as_secs_f64());
        let hundreds = usize::from(status.as_u16() / 100);
        let kind = if hundreds < STATUSES.len() { hundreds } else { 0 };
        let count = meter.statuses[kind].get_or_init(|| {
            let labels = Request { route: meter.route, method: meter.method, status: STATUSES[kind] };
            self.requests.get_or_create(&labels).clone()
        });
        count.inc();
    }

    fn meters_of(&self, route: &str) -> (&'static str, Arc<[OnceLock<Meter>; METHODS.len()]>) {
        if let Some((route, methods)) =
            self.meters.read().unwrap_or_else(PoisonError::into_inner).get_key_value(route)
        {
            return (route, Arc::clone(methods));
        }
        let route = kept(route);
        let mut meters = self.meters.write().unwrap_or_else(PoisonError::into_inner);
        (route, Arc::clone(meters.entry(route).or_default()))
    }

    /// An answer with an error's code in it.
    pub fn refused(&self, code: &str) {
        self.errors.get_or_create(&ErrorCode { code: code.to_owned() }).inc();
    }

    /// All of it as text. `machine` is what the backend says now, if it says anything.
    pub fn text(
        &self,
        engine: &Engine,
        machine: Option<MachineStats>,
        streams: usize,
    ) -> Result<String, fmt::Error> {
        engine.look_at_metrics();
        self.streams.set(streams as i64);
        *self.machine.lock().unwrap_or_else(PoisonError::into_inner) = machine;
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

/// A route's template for as long as the program runs: once for each, however many servers there are in it.
fn kept(route: &str) -> &'static str {
    static KEPT: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut all = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = all.get(route) {
        return known;
    }
    let new: &'static str = Box::leak(route.into());
    all.insert(new);
    new
}

/// One figure without labels.
fn figure(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: impl EncodeMetric,
) -> Result<(), fmt::Error> {
    let value_encoder = encoder.encode_descriptor(name, help, unit, value.metric_type())?;
    value.encode(value_encoder)
}

/// What all sandboxes together use, and what they may.
#[derive(Debug)]
struct MachineFigures(Arc<Mutex<Option<MachineStats>>>);

impl Collector for MachineFigures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let machine = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stats) = &*machine else { return Ok(()) };
        let to = &mut encoder;
        let gauge = |bytes: u64| ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
        let used = &stats.machine.sandboxes;
        let (seconds, bytes) = (Some(&Unit::Seconds), Some(&Unit::Bytes));
        let cpu = ConstCounter::new(used.cpu_time.as_secs_f64());
        figure(
            to,
            "sandboxes_cpu",
            "Processor time of all sandboxes, those that are gone included",
            seconds,
            cpu,
        )?;
        let memory = gauge(used.memory_bytes);
        figure(to, "sandboxes_memory", "Memory of all sandboxes, page cache included", bytes, memory)?;
        let pids = gauge(used.pids.into());
        figure(to, "sandboxes_pids", "Processes and threads of all sandboxes", None, pids)?;
        let promised = ConstGauge::new(stats.promised.cpu_millis as f64 / 1000.0);
        figure(to, "promised_cpus", "Processors that all sandboxes together may use", None, promised)?;
        let promised = gauge(stats.promised.memory_bytes);
        figure(to, "promised_memory", "Memory that all sandboxes together may use", bytes, promised)?;
        let available = gauge(stats.machine.memory_available_bytes);
        figure(
            to,
            "machine_memory_available",
            "Memory that could be had without swapping",
            bytes,
            available,
        )?;
        let available = gauge(stats.machine.disk_available_bytes);
        figure(to, "machine_disk_available", "Free on the file system of sandboxes' files", bytes, available)
    }
}

/// The daemon's own process, under the names that every Prometheus client uses.
#[derive(Debug)]
struct ProcessFigures;

impl Collector for ProcessFigures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // A machine without /proc runs no sandboxes. If it cannot be read now, the other figures are still worth telling.
        let Some(own) = Own::read() else { return Ok(()) };
        let to = &mut encoder;
        let (seconds, bytes) = (Some(&Unit::Seconds), Some(&Unit::Bytes));
        let cpu = ConstCounter::new(own.cpu_seconds);
        figure(to, "process_cpu", "Processor time of the daemon, without its launcher", seconds, cpu)?;
        let memory = ConstGauge::new(own.resident_bytes);
        figure(to, "process_resident_memory", "Resident memory of the daemon", bytes, memory)?;
        figure(to, "process_threads", "Threads of the daemon", None, ConstGauge::new(own.threads))?;
        figure(
            to,
            "process_open_fds",
            "Open descriptors of the daemon",
            None,
            ConstGauge::new(own.open_fds),
        )?;
        let most = ConstGauge::new(own.max_fds);
        figure(to, "process_max_fds", "Descriptors that the daemon may have open", None, most)?;
        let began = ConstGauge::new(own.start_seconds);
        figure(to, "process_start_time", "When the daemon began, since 1970", seconds, began)
    }
}

/// Resident memory of this process, from proc_pid_statm(5).
pub fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// What the kernel says of this process.
struct Own {
    cpu_seconds: f64,
    resident_bytes: i64,
    threads: i64,
    open_fds: i64,
    max_fds: i64,
    start_seconds: f64,
}

impl Own {
    fn read() -> Option<Self> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        // The name is in brackets and may hold anything; what follows is proc_pid_stat(5) from its third field on.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        let (threads, began, pages) = (field(20)?, field(22)?, field(24)?);
        let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
        let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
        let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        Some(Self {
            cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
            resident_bytes: pages as i64 * rustix::param::page_size() as i64,
            threads: threads as i64,
            open_fds: std::fs::read_dir("/proc/self/fd").ok()?.count() as i64,
            max_fds: limits.current.and_then(|most| i64::try_from(most).ok()).unwrap_or(i64::MAX),
            start_seconds: now - uptime + began / TICKS_PER_SECOND,
        })
    }
}
