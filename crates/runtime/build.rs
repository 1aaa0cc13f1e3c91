//! Builds init as a static executable, so that the launcher can carry it inside itself.
//!
//! `crt-static` as a flag for the whole workspace would break procedural macros, so init has a cargo run of its own,
//! with an explicit target and a target directory of its own (cargo holds a lock on the outer one).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let root =
        manifest.parent().and_then(Path::parent).expect("this crate is two folders below the workspace");
    for watched in [
        "Cargo.toml",
        "Cargo.lock",
        "crates/archive/Cargo.toml",
        "crates/archive/src",
        "crates/guest/Cargo.toml",
        "crates/guest/src",
        "crates/wire/Cargo.toml",
        "crates/wire/src",
    ] {
        println!("cargo:rerun-if-changed={}", root.join(watched).display());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    // OUT_DIR is <target>/<profile>/build/<package>/out. All profiles share one build of init.
    let target_dir = out.ancestors().nth(4).expect("OUT_DIR lies in a target directory").join("init");
    let triple = env::var("TARGET").expect("cargo sets it");

    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets it"));
    cargo
        .current_dir(root)
        .args(["build", "--quiet", "--package", "shoal-guest", "--profile", "init", "--target", &triple])
        .arg("--target-dir")
        .arg(&target_dir)
        .env(
            "CARGO_ENCODED_RUSTFLAGS",
            ["-Ctarget-feature=+crt-static", "-Crelocation-model=static"].join("\x1f"),
        );
    // What the outer cargo (or clippy) set for itself is not meant for the inner one.
    for (name, _) in env::vars() {
        let outer = ["CARGO_CFG_", "CARGO_FEATURE_", "CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BUILD_", "DEP_"];
        let single = [
            "RUSTC",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
            "CLIPPY_ARGS",
            "RUSTFLAGS",
            "CARGO_MAKEFLAGS",
        ];
        if outer.iter().any(|prefix| name.starts_with(prefix)) || single.contains(&name.as_str()) {
            cargo.env_remove(name);
        }
    }
    let status = cargo.status().expect("cargo can be run");
    assert!(status.success(), "init does not build");
    let built = target_dir.join(triple).join("init").join("shoal-init");
    fs::copy(&built, out.join("shoal-init"))
        .unwrap_or_else(|e| panic!("cannot copy {}: {e}", built.display()));
}
