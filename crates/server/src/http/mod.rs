//! The base of the native API and of every dialect: the layers that a request passes, how it is read, how it is
//! rejected.
//!
//! This module knows no route and no dialect.

pub mod app;
pub mod auth;
pub mod body;
pub mod budget;
pub mod clock;
pub mod conditions;
pub mod download;
pub mod drain;
pub mod error;
pub mod locate;
pub mod origin;
pub mod params;
pub mod places;
pub mod port_names;
pub mod sse;
pub mod text;
pub mod upload;
pub mod websocket;
