//! The daemon's routes on the fake backend, and its reference pages, in one executable: a module for each file.

mod page;

mod metrics;
mod openapi;
mod ports;
mod reference;
mod router;
mod socket;
