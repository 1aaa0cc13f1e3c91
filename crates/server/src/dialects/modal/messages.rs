//! The messages of Modal's two services that are used here, with the fields that are used: readers of protobuf skip the rest.
//!
//! A `oneof` is written as optional fields, which are the same bytes. Between the clients 1.5 and 1.6 every change of these
//! messages is an addition, so one definition serves both.

#![allow(missing_docs)] // The names are the vendor's, and its documents say what they are.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;

#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub struct StringMap {
    #[prost(btree_map = "string, string", tag = "1")]
    pub contents: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct AppGetOrCreateRequest {
    #[prost(string, tag = "1")]
    pub app_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct AppGetOrCreateResponse {
    #[prost(string, tag = "1")]
    pub app_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct EnvironmentGetOrCreateRequest {
    #[prost(string, tag = "1")]
    pub name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct EnvironmentGetOrCreateResponse {
    #[prost(string, tag = "1")]
    pub environment_id: String,
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<EnvironmentMetadata>,
}

#[derive(Clone, PartialEq, Message)]
pub struct EnvironmentMetadata {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, optional, tag = "2")]
    pub settings: Option<EnvironmentSettings>,
}

#[derive(Clone, PartialEq, Message)]
pub struct EnvironmentSettings {
    #[prost(string, tag = "1")]
    pub image_builder_version: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct AuthTokenGetResponse {
    #[prost(string, tag = "1")]
    pub token: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ClientHelloResponse {
    #[prost(string, tag = "2")]
    pub image_builder_version: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct BaseImage {
    #[prost(string, tag = "1")]
    pub image_id: String,
    #[prost(string, tag = "2")]
    pub docker_tag: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Image {
    #[prost(message, repeated, tag = "5")]
    pub base_images: Vec<BaseImage>,
    #[prost(string, repeated, tag = "6")]
    pub dockerfile_commands: Vec<String>,
    #[prost(message, repeated, tag = "7")]
    pub context_files: Vec<ContextFile>,
    #[prost(string, tag = "15")]
    pub context_mount_id: String,
    #[prost(message, optional, tag = "16")]
    pub gpu_config: Option<GpuConfig>,
    #[prost(message, optional, tag = "21")]
    pub build_function: Option<Empty>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ContextFile {
    #[prost(string, tag = "1")]
    pub filename: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ImageGetOrCreateRequest {
    #[prost(message, optional, tag = "2")]
    pub image: Option<Image>,
    #[prost(string, tag = "5")]
    pub existing_image_id: String,
    #[prost(int32, tag = "8")]
    pub namespace: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct ImageGetOrCreateResponse {
    #[prost(string, tag = "1")]
    pub image_id: String,
    #[prost(message, optional, tag = "2")]
    pub result: Option<GenericResult>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ImageFromIdRequest {
    #[prost(string, tag = "1")]
    pub image_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ImageFromIdResponse {
    #[prost(string, tag = "1")]
    pub image_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct GenericResult {
    #[prost(int32, tag = "1")]
    pub status: i32,
    #[prost(string, tag = "2")]
    pub exception: String,
    #[prost(int32, tag = "3")]
    pub exitcode: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct GpuConfig {
    #[prost(int32, tag = "1")]
    pub kind: i32,
    #[prost(uint32, tag = "2")]
    pub count: u32,
    #[prost(string, tag = "4")]
    pub gpu_type: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct Resources {
    #[prost(uint32, tag = "2")]
    pub memory_mb: u32,
    #[prost(uint32, tag = "3")]
    pub milli_cpu: u32,
    #[prost(message, optional, tag = "4")]
    pub gpu_config: Option<GpuConfig>,
}

#[derive(Clone, PartialEq, Message)]
pub struct NetworkAccess {
    #[prost(int32, tag = "1")]
    pub network_access_type: i32,
    #[prost(string, repeated, tag = "2")]
    pub allowed_cidrs: Vec<String>,
    #[prost(string, repeated, tag = "3")]
    pub allowed_domains: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PortSpecs {
    #[prost(message, repeated, tag = "1")]
    pub ports: Vec<Empty>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PtyInfo {
    #[prost(bool, tag = "1")]
    pub enabled: bool,
    #[prost(uint32, tag = "2")]
    pub winsz_rows: u32,
    #[prost(uint32, tag = "3")]
    pub winsz_cols: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Definition {
    #[prost(string, repeated, tag = "1")]
    pub entrypoint_args: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub mount_ids: Vec<String>,
    #[prost(string, tag = "3")]
    pub image_id: String,
    #[prost(string, repeated, tag = "4")]
    pub secret_ids: Vec<String>,
    #[prost(message, optional, tag = "5")]
    pub resources: Option<Resources>,
    #[prost(uint32, tag = "7")]
    pub timeout_secs: u32,
    #[prost(string, optional, tag = "8")]
    pub workdir: Option<String>,
    #[prost(message, repeated, tag = "9")]
    pub nfs_mounts: Vec<Empty>,
    #[prost(message, repeated, tag = "13")]
    pub volume_mounts: Vec<Empty>,
    #[prost(message, repeated, tag = "14")]
    pub cloud_bucket_mounts: Vec<Empty>,
    #[prost(message, optional, tag = "20")]
    pub open_ports: Option<PortSpecs>,
    #[prost(message, optional, tag = "22")]
    pub network_access: Option<NetworkAccess>,
    #[prost(string, optional, tag = "23")]
    pub proxy_id: Option<String>,
    #[prost(string, optional, tag = "30")]
    pub name: Option<String>,
    #[prost(uint32, optional, tag = "33")]
    pub idle_timeout_secs: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Tag {
    #[prost(string, tag = "1")]
    pub tag_name: String,
    #[prost(string, tag = "2")]
    pub tag_value: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct HandleMetadata {
    #[prost(message, optional, tag = "1")]
    pub result: Option<GenericResult>,
    #[prost(string, tag = "2")]
    pub app_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct SecretSource {
    #[prost(string, optional, tag = "1")]
    pub secret_id: Option<String>,
    #[prost(message, optional, tag = "2")]
    pub env: Option<StringMap>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxCreateRequest {
    #[prost(string, tag = "1")]
    pub app_id: String,
    #[prost(message, optional, tag = "2")]
    pub definition: Option<Definition>,
    #[prost(message, repeated, tag = "4")]
    pub tags: Vec<Tag>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxCreateResponse {
    #[prost(string, tag = "1")]
    pub sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<HandleMetadata>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxCreateV2Request {
    #[prost(string, tag = "1")]
    pub app_id: String,
    #[prost(message, optional, tag = "2")]
    pub definition: Option<Definition>,
    #[prost(message, optional, tag = "3")]
    pub ephemeral_secrets: Option<StringMap>,
    #[prost(message, repeated, tag = "4")]
    pub tags: Vec<Tag>,
    #[prost(message, repeated, tag = "6")]
    pub secret_sources: Vec<SecretSource>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxCreateV2Response {
    #[prost(string, tag = "1")]
    pub sandbox_id: String,
    #[prost(string, tag = "3")]
    pub task_id: String,
    #[prost(message, optional, tag = "4")]
    pub metadata: Option<HandleMetadata>,
    #[prost(message, optional, tag = "5")]
    pub command_router_access: Option<RouterAccess>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RouterAccess {
    #[prost(string, tag = "1")]
    pub jwt: String,
    #[prost(string, tag = "2")]
    pub url: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxRequest {
    #[prost(string, tag = "1")]
    pub sandbox_id: String,
    #[prost(float, tag = "2")]
    pub timeout: f32,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxGetTaskIdResponse {
    #[prost(string, optional, tag = "1")]
    pub task_id: Option<String>,
    #[prost(message, optional, tag = "2")]
    pub task_result: Option<GenericResult>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TaskRequest {
    #[prost(string, tag = "1")]
    pub task_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct RouterAccessRequest {
    #[prost(string, optional, tag = "1")]
    pub sandbox_id: Option<String>,
    #[prost(string, optional, tag = "2")]
    pub task_id: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxWaitResponse {
    #[prost(message, optional, tag = "1")]
    pub result: Option<GenericResult>,
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<HandleMetadata>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxTerminateResponse {
    #[prost(message, optional, tag = "1")]
    pub existing_result: Option<GenericResult>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxListRequest {
    #[prost(string, tag = "1")]
    pub app_id: String,
    #[prost(double, tag = "2")]
    pub before_timestamp: f64,
    #[prost(bool, tag = "4")]
    pub include_finished: bool,
    #[prost(message, repeated, tag = "5")]
    pub tags: Vec<Tag>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxListResponse {
    #[prost(message, repeated, tag = "1")]
    pub sandboxes: Vec<SandboxInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxInfo {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(double, tag = "3")]
    pub created_at: f64,
    #[prost(message, optional, tag = "4")]
    pub task_info: Option<TaskInfo>,
    #[prost(string, tag = "5")]
    pub app_id: String,
    #[prost(message, repeated, tag = "6")]
    pub tags: Vec<Tag>,
    #[prost(string, tag = "7")]
    pub name: String,
    #[prost(string, tag = "8")]
    pub image_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct TaskInfo {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(double, tag = "2")]
    pub started_at: f64,
}

#[derive(Clone, PartialEq, Message)]
pub struct TagsGetResponse {
    #[prost(message, repeated, tag = "1")]
    pub tags: Vec<Tag>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TagsSetRequest {
    #[prost(string, tag = "2")]
    pub sandbox_id: String,
    #[prost(message, repeated, tag = "3")]
    pub tags: Vec<Tag>,
}

#[derive(Clone, PartialEq, Message)]
pub struct GetFromNameRequest {
    #[prost(string, tag = "1")]
    pub sandbox_name: String,
    #[prost(string, tag = "3")]
    pub app_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct GetFromNameResponse {
    #[prost(string, tag = "1")]
    pub sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<HandleMetadata>,
}

#[derive(Clone, PartialEq, Message)]
pub struct GetLogsRequest {
    #[prost(string, tag = "1")]
    pub sandbox_id: String,
    #[prost(int32, tag = "2")]
    pub file_descriptor: i32,
    #[prost(float, tag = "3")]
    pub timeout: f32,
    #[prost(string, tag = "4")]
    pub last_entry_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct TaskLogs {
    #[prost(string, tag = "1")]
    pub data: String,
    #[prost(double, tag = "7")]
    pub timestamp: f64,
    #[prost(int32, tag = "8")]
    pub file_descriptor: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct TaskLogsBatch {
    #[prost(message, repeated, tag = "2")]
    pub items: Vec<TaskLogs>,
    #[prost(string, tag = "5")]
    pub entry_id: String,
    #[prost(bool, tag = "14")]
    pub eof: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct StdinWriteRequest {
    #[prost(string, tag = "1")]
    pub sandbox_id: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub input: Bytes,
    #[prost(uint32, tag = "3")]
    pub index: u32,
    #[prost(bool, tag = "4")]
    pub eof: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct SecretGetOrCreateRequest {
    #[prost(string, tag = "1")]
    pub deployment_name: String,
    #[prost(int32, tag = "4")]
    pub object_creation_type: i32,
    #[prost(btree_map = "string, string", tag = "5")]
    pub env_dict: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SecretGetOrCreateResponse {
    #[prost(string, tag = "1")]
    pub secret_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct FilesystemExecRequest {
    #[prost(message, optional, tag = "1")]
    pub open: Option<FileOpen>,
    #[prost(message, optional, tag = "2")]
    pub write: Option<FileWrite>,
    #[prost(message, optional, tag = "3")]
    pub read: Option<FileRead>,
    #[prost(message, optional, tag = "4")]
    pub flush: Option<FileDescriptor>,
    #[prost(message, optional, tag = "5")]
    pub read_line: Option<FileDescriptor>,
    #[prost(message, optional, tag = "6")]
    pub seek: Option<FileSeek>,
    #[prost(message, optional, tag = "9")]
    pub close: Option<FileDescriptor>,
    #[prost(string, tag = "10")]
    pub task_id: String,
    #[prost(message, optional, tag = "11")]
    pub ls: Option<FileLs>,
    #[prost(message, optional, tag = "12")]
    pub mkdir: Option<FileMkdir>,
    #[prost(message, optional, tag = "13")]
    pub rm: Option<FileRm>,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileOpen {
    #[prost(string, tag = "2")]
    pub path: String,
    #[prost(string, tag = "3")]
    pub mode: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileWrite {
    #[prost(string, tag = "1")]
    pub file_descriptor: String,
    #[prost(bytes = "bytes", tag = "2")]
    pub data: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileRead {
    #[prost(string, tag = "1")]
    pub file_descriptor: String,
    #[prost(uint32, optional, tag = "2")]
    pub n: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileDescriptor {
    #[prost(string, tag = "1")]
    pub file_descriptor: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileSeek {
    #[prost(string, tag = "1")]
    pub file_descriptor: String,
    #[prost(int32, tag = "2")]
    pub offset: i32,
    #[prost(int32, tag = "3")]
    pub whence: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileLs {
    #[prost(string, tag = "1")]
    pub path: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileMkdir {
    #[prost(string, tag = "1")]
    pub path: String,
    #[prost(bool, tag = "2")]
    pub make_parents: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileRm {
    #[prost(string, tag = "1")]
    pub path: String,
    #[prost(bool, tag = "2")]
    pub recursive: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct FilesystemExecResponse {
    #[prost(string, tag = "1")]
    pub exec_id: String,
    #[prost(string, optional, tag = "2")]
    pub file_descriptor: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct FilesystemOutputRequest {
    #[prost(string, tag = "1")]
    pub exec_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct FilesystemOutput {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub output: Vec<Bytes>,
    #[prost(message, optional, tag = "2")]
    pub error: Option<SystemError>,
    #[prost(uint64, tag = "3")]
    pub batch_index: u64,
    #[prost(bool, tag = "4")]
    pub eof: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct SystemError {
    #[prost(int32, tag = "1")]
    pub error_code: i32,
    #[prost(string, tag = "2")]
    pub error_message: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ExecStartRequest {
    #[prost(string, tag = "1")]
    pub task_id: String,
    #[prost(string, tag = "2")]
    pub exec_id: String,
    #[prost(string, repeated, tag = "3")]
    pub command_args: Vec<String>,
    #[prost(int32, tag = "4")]
    pub stdout_config: i32,
    #[prost(int32, tag = "5")]
    pub stderr_config: i32,
    #[prost(uint32, optional, tag = "6")]
    pub timeout_secs: Option<u32>,
    #[prost(string, optional, tag = "7")]
    pub workdir: Option<String>,
    #[prost(string, repeated, tag = "8")]
    pub secret_ids: Vec<String>,
    #[prost(message, optional, tag = "9")]
    pub pty_info: Option<PtyInfo>,
    #[prost(btree_map = "string, string", tag = "12")]
    pub env: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "13")]
    pub secret_sources: Vec<SecretSource>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ExecRequest {
    #[prost(string, tag = "1")]
    pub task_id: String,
    #[prost(string, tag = "2")]
    pub exec_id: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct ExecStatus {
    #[prost(int32, optional, tag = "1")]
    pub code: Option<i32>,
    #[prost(int32, optional, tag = "2")]
    pub signal: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StdioReadRequest {
    #[prost(string, tag = "1")]
    pub task_id: String,
    #[prost(string, tag = "2")]
    pub exec_id: String,
    #[prost(uint64, tag = "3")]
    pub offset: u64,
    #[prost(int32, tag = "4")]
    pub file_descriptor: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct StdioReadResponse {
    #[prost(bytes = "bytes", tag = "1")]
    pub data: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub struct ExecStdinWriteRequest {
    #[prost(string, tag = "1")]
    pub task_id: String,
    #[prost(string, tag = "2")]
    pub exec_id: String,
    #[prost(uint64, tag = "3")]
    pub offset: u64,
    #[prost(bytes = "bytes", tag = "4")]
    pub data: Bytes,
    #[prost(bool, tag = "5")]
    pub eof: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct StdinWriteStreamRequest {
    #[prost(message, optional, tag = "1")]
    pub start: Option<StdinWriteStreamStart>,
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub data: Option<Bytes>,
    #[prost(message, optional, tag = "3")]
    pub end: Option<Empty>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StdinWriteStreamStart {
    #[prost(string, tag = "1")]
    pub task_id: String,
    #[prost(string, tag = "2")]
    pub exec_id: String,
    #[prost(uint64, tag = "3")]
    pub offset: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct StdinStatusResponse {
    #[prost(uint64, tag = "1")]
    pub num_bytes_written: u64,
    #[prost(bool, tag = "2")]
    pub closed: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxStdioReadRequest {
    #[prost(string, tag = "1")]
    pub task_id: String,
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    #[prost(int32, tag = "3")]
    pub file_descriptor: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxStdioReadResponse {
    #[prost(bytes = "bytes", tag = "1")]
    pub data: Bytes,
    #[prost(uint64, tag = "2")]
    pub starting_offset: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct SandboxStdinWriteRequest {
    #[prost(string, tag = "1")]
    pub task_id: String,
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    #[prost(bytes = "bytes", tag = "3")]
    pub data: Bytes,
    #[prost(bool, tag = "4")]
    pub eof: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct WaitUntilReadyResponse {
    #[prost(double, tag = "1")]
    pub ready_at: f64,
}
