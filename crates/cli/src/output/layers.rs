//! A bar per layer on a terminal, for people who wait for an image. Nothing where nobody looks.

use std::io::IsTerminal;

use client::api::{LayerProgress, LayerState};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// Layers with a bar of their own; of more, only those that something happens to. A screen has so many lines.
const BARS_MAX: usize = 20;
/// How much of a digest is shown.
const DIGITS_SHOWN: usize = 12;

/// The bars.
pub struct Layers {
    bars: Option<MultiProgress>,
    shown: Vec<ProgressBar>,
    style: ProgressStyle,
}

impl Layers {
    /// None yet. They appear when it is known what there is to wait for.
    pub fn new(colour: bool) -> Self {
        let bar = if colour { "{bar:30.cyan/dim}" } else { "{bar:30}" };
        let template = format!("{{prefix}} {bar} {{bytes:>10}} / {{total_bytes:<10}} {{msg}}");
        let style = ProgressStyle::with_template(&template).expect("the template is written here");
        let bars = std::io::stderr().is_terminal().then(MultiProgress::new);
        Self { bars, shown: Vec::new(), style: style.progress_chars("━━╌") }
    }

    /// How far all of them are.
    pub fn show(&mut self, layers: &[LayerProgress]) {
        let Some(bars) = &self.bars else { return };
        if self.shown.len() != layers.len() {
            self.shown.drain(..).for_each(|bar| bar.finish_and_clear());
            for layer in layers {
                let bar = ProgressBar::hidden();
                bar.set_style(self.style.clone());
                let digits = layer.digest.strip_prefix("sha256:").unwrap_or(&layer.digest);
                bar.set_prefix(digits.get(..DIGITS_SHOWN).unwrap_or(digits).to_owned());
                self.shown.push(if layers.len() <= BARS_MAX { bars.add(bar) } else { bar });
            }
        }
        let many = layers.len() > BARS_MAX;
        for (layer, bar) in layers.iter().zip(&mut self.shown) {
            let works = matches!(layer.state, LayerState::Fetching | LayerState::Unpacking);
            if many && works && bar.is_hidden() && !bar.is_finished() {
                *bar = bars.add(bar.clone());
            }
            bar.set_length(layer.total_bytes);
            bar.set_position(layer.bytes);
            bar.set_message(word(layer.state));
            if matches!(layer.state, LayerState::Done | LayerState::Present) && !bar.is_finished() {
                if many { bar.finish_and_clear() } else { bar.finish() }
            }
        }
    }
}

impl Drop for Layers {
    /// What is left on the screen is what the command prints.
    fn drop(&mut self) {
        if let Some(bars) = &self.bars {
            let _ = bars.clear(); // If it cannot be cleared, nothing is lost.
        }
    }
}

fn word(state: LayerState) -> &'static str {
    match state {
        LayerState::Waiting => "waiting",
        LayerState::Fetching => "fetching",
        LayerState::Fetched => "fetched",
        LayerState::Unpacking => "unpacking",
        LayerState::Done => "done",
        LayerState::Present => "cached",
    }
}
