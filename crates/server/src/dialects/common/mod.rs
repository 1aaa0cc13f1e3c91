//! What every dialect needs and none would do otherwise: usual statuses, what an answer tells the log, amounts, forms, images from
//! Dockerfiles, home directories, networks, stopping and starting.

pub mod amount;
pub mod ascii;
pub mod dockerfile;
pub mod error;
pub mod form;
pub mod home;
pub mod network;
pub mod pause;
pub mod spelling;
