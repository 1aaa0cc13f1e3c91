//! Tests of the whole process, on loopback.
