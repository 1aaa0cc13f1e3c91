//! `shoal`: the command line, the daemon and, hidden, the launcher and egress, in one program.
//!
//! Reads the arguments and the environment once, hands them down, and ends the process with the right code. What the
//! subcommands do is in their modules; all but `serve`, `launcher` and `doctor` are clients and know nothing of the engine.

#![forbid(unsafe_code)]

mod args;
mod bench;
mod commands;
mod daemon;
mod environment;
mod output;
mod terminal;

use std::process::exit;

use clap::{ArgMatches, CommandFactory, FromArgMatches};

use crate::args::{Arguments, ConfigAction, Image, ImageAction, KeyAction, Subcommand};
use crate::commands::{
    admin, build, command, completions, config, copy, dialects, doctor, forward, image, key, launcher,
    lifetime, logs, net, pause, pool, ports, run, sandbox, secret, serve, shell, snapshot, stats, template,
    top, version, volume, watch, webhook,
};
use crate::daemon::settings;
use crate::environment::Environment;
use crate::output::{print, report};

/// A failure of our own, for all subcommands that run nothing.
const FAILED: i32 = 1;
/// As with `FAILED`, where the codes up to 124 may be the command's own.
const RUN_FAILED: i32 = 125;

fn main() {
    let matches = Arguments::command().get_matches();
    let mut arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    if wants_json(&matches) {
        report::set_json();
    }
    let environment = Environment::read(arguments.color);
    print::set_colour(environment.colour_stdout);
    // The launcher is one thread, so nothing is started before it is known not to be wanted.
    match &mut arguments.subcommand {
        Subcommand::Doctor(doctor) => {
            let data_dir = doctor.data_dir.clone().unwrap_or_else(|| settings::data_dir(&environment));
            doctor.findings = runtime::doctor::examine(&data_dir);
        }
        Subcommand::Launcher(config) => exit(end(&environment, FAILED, launcher::run(config).map(|()| 0))),
        // Egress gives up its rights before it has threads.
        Subcommand::Egress => {
            exit(end(&environment, FAILED, egress::process::main().map(|()| 0).map_err(Into::into)))
        }
        Subcommand::BenchFloor(floor) => exit(end(&environment, FAILED, bench::run_floor(floor).map(|()| 0))),
        _ => {}
    }
    let failed = match &arguments.subcommand {
        Subcommand::Run(_) | Subcommand::Exec(_) | Subcommand::Shell(_) | Subcommand::Attach(_) => RUN_FAILED,
        _ => FAILED,
    };
    // A daemon has much to do at once. What asks it waits for one thing after the other, and is quicker without threads to wake.
    let mut runtime = match &arguments.subcommand {
        Subcommand::Serve(_) => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    let result = runtime.enable_all().build().map_err(anyhow::Error::from).and_then(|runtime| {
        let result = runtime.block_on(dispatch(arguments.subcommand, &environment));
        // A thread that waits for input would keep the process; nothing it could still do matters.
        runtime.shutdown_background();
        result
    });
    exit(end(&environment, failed, result));
}

/// Whether `--json` was given, to whichever subcommand.
fn wants_json(matches: &ArgMatches) -> bool {
    match matches.subcommand() {
        Some((_, below)) => matches!(below.try_get_one::<bool>("json"), Ok(Some(true))) || wants_json(below),
        None => false,
    }
}

fn end(environment: &Environment, failed: i32, result: anyhow::Result<i32>) -> i32 {
    result.unwrap_or_else(|error| {
        report::failure(&error, environment.colour);
        failed
    })
}

async fn dispatch(subcommand: Subcommand, environment: &Environment) -> anyhow::Result<i32> {
    match subcommand {
        Subcommand::Serve(arguments) => serve::serve(*arguments, environment).await,
        Subcommand::Run(arguments) => run::run(*arguments, environment).await,
        Subcommand::Exec(arguments) => run::run((*arguments).into(), environment).await,
        Subcommand::Shell(arguments) => shell::shell(*arguments, environment).await,
        Subcommand::Attach(arguments) => shell::attach(arguments, environment).await,
        Subcommand::Create(arguments) => sandbox::create(*arguments, environment).await,
        Subcommand::Ls(arguments) if arguments.all_owners => {
            admin::list(arguments.quiet, arguments.json, environment).await
        }
        Subcommand::Ls(arguments) => sandbox::list(arguments, environment).await,
        Subcommand::Inspect(arguments) => sandbox::inspect(arguments, environment).await,
        Subcommand::Rename(arguments) => sandbox::rename(arguments, environment).await,
        Subcommand::Ps(arguments) => command::list(arguments, environment).await,
        Subcommand::Kill(arguments) => command::kill(arguments, environment).await,
        Subcommand::Label(arguments) => lifetime::label(arguments, environment).await,
        Subcommand::Lifetime(arguments) => lifetime::lifetime(arguments, environment).await,
        Subcommand::Touch(arguments) => lifetime::touch(arguments, environment).await,
        Subcommand::Explain(arguments) => lifetime::explain(arguments, environment).await,
        Subcommand::Pause(arguments) => pause::pause(arguments, environment).await,
        Subcommand::Resume(arguments) => pause::resume(arguments, environment).await,
        Subcommand::Rm(arguments) if arguments.all_owners => {
            admin::remove(&arguments.sandboxes, environment).await
        }
        Subcommand::Rm(arguments) => sandbox::remove(arguments, environment).await,
        Subcommand::Cp(arguments) => copy::copy(arguments, environment).await,
        Subcommand::Logs(arguments) => logs::logs(arguments, environment).await,
        Subcommand::Watch(arguments) => watch::watch(arguments, environment).await,
        Subcommand::Webhook(arguments) => webhook::webhook(arguments, environment).await,
        Subcommand::Ports(arguments) => ports::ports(arguments, environment).await,
        Subcommand::Url(arguments) => ports::url(arguments, environment).await,
        Subcommand::Forward(arguments) => forward::forward(arguments, environment).await,
        Subcommand::Stats(arguments) => stats::stats(arguments, environment).await,
        Subcommand::Top(arguments) => top::top(arguments, environment).await,
        Subcommand::Image(arguments) => image::image(arguments, environment).await,
        Subcommand::Images(arguments) => {
            image::image(Image { action: ImageAction::Ls(arguments) }, environment).await
        }
        Subcommand::Pull(arguments) => {
            image::image(Image { action: ImageAction::Pull(arguments) }, environment).await
        }
        Subcommand::Build(arguments) => build::build(*arguments, environment).await,
        Subcommand::Net(arguments) => net::net(*arguments, environment).await,
        Subcommand::Secret(arguments) => secret::secret(arguments, environment).await,
        Subcommand::Ledger(arguments) => secret::ledger(arguments, environment).await,
        Subcommand::Pool(arguments) => pool::pool(arguments, environment).await,
        Subcommand::Template(arguments) => template::template(arguments, environment).await,
        Subcommand::Volume(arguments) => volume::volume(arguments, environment).await,
        Subcommand::Snapshot(arguments) => snapshot::snapshot(arguments, environment).await,
        Subcommand::Rollback(arguments) => snapshot::rollback(arguments, environment).await,
        Subcommand::Fork(arguments) => snapshot::fork(arguments, environment).await,
        Subcommand::Tree(arguments) => snapshot::tree(arguments, environment).await,
        Subcommand::Diff(arguments) => snapshot::diff(arguments, environment).await,
        Subcommand::Promote(arguments) => snapshot::promote(arguments, environment).await,
        Subcommand::History(arguments) => snapshot::history(arguments, environment).await,
        Subcommand::Undo(arguments) => snapshot::undo(arguments, environment).await,
        Subcommand::Key(arguments) => match arguments.action {
            KeyAction::Create(arguments) => key::create(arguments, environment).await,
            KeyAction::Ls(arguments) => key::list(arguments, environment).await,
            KeyAction::Rm(arguments) => key::remove(arguments, environment).await,
        },
        Subcommand::Config(arguments) => match arguments.action {
            ConfigAction::Show(arguments) => config::show(*arguments, environment),
        },
        Subcommand::Dialects(arguments) => dialects::dialects(arguments, environment).await,
        Subcommand::Doctor(arguments) => doctor::doctor(arguments, environment).await,
        Subcommand::Completions(arguments) => completions::completions(&arguments),
        Subcommand::CompleteNames(arguments) => completions::names(arguments, environment).await,
        Subcommand::Version(arguments) => version::version(arguments, environment).await,
        Subcommand::Bench(arguments) => bench::bench(&arguments).await.map(|()| 0),
        Subcommand::Launcher(_) | Subcommand::Egress | Subcommand::BenchFloor(_) => {
            unreachable!("what has one thread is started before the runtime")
        }
    }
}
