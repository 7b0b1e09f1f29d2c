//! `loss.png`: the loss curves over the bytes trained on, and below them the gap between the two runs.
//!
//! Single steps are noisy, each batch being of other text; the curves show an exponential mean. The validation
//! points are drawn as they are. The font is compiled in, so that a machine without fonts draws the same picture.

use std::path::Path;
use std::sync::Once;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};

use crate::Error;
use crate::config::Precision;
use crate::files::write_whole;
use crate::metrics::Metrics;

const SIZE: (u32, u32) = (1200, 800);
/// Height of the upper panel when the gap is drawn below it.
const SPLIT: u32 = 560;
/// Share of the newest step in the exponential mean.
const SMOOTHING: f64 = 0.05;
const FONT: &[u8] = include_bytes!("../data/DejaVuSans-ascii.ttf");

type Area<'a> = DrawingArea<BitMapBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, BitMapBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// One run, ready to draw: x is thousands of bytes.
struct Curve {
    precision: Precision,
    training: Vec<(f64, f64)>,
    validation: Vec<(f64, f64)>,
}

/// Draws the curves of `metrics`, with the loss of the unigram model as a line to beat.
pub(crate) fn save(path: &Path, metrics: &Metrics, unigram: f64) -> Result<(), Error> {
    let failed = |reason: String| Error::Plot { path: path.to_owned(), reason };
    let mut pixels = vec![255; (SIZE.0 * SIZE.1 * 3) as usize];
    let curves: Vec<Curve> = metrics.precisions().into_iter().map(|run| Curve::of(metrics, run)).collect();
    draw(&mut pixels, &curves, unigram).map_err(|error| failed(error.to_string()))?;
    let png = encode(&pixels).map_err(|error| failed(error.to_string()))?;
    write_whole(path, &png)
}

impl Curve {
    fn of(metrics: &Metrics, precision: Precision) -> Self {
        let kilobytes = |bytes: usize| bytes as f64 / 1e3;
        let (mut sum, mut weight) = (0.0, 0.0);
        let training = metrics.of(precision).map(|row| {
            sum += SMOOTHING * (f64::from(row.train_loss) - sum);
            // The weights of the steps so far: without the division the curve would start at zero.
            weight += SMOOTHING * (1.0 - weight);
            (kilobytes(row.bytes), sum / weight)
        });
        let training = training.collect();
        let validation = metrics
            .of(precision)
            .filter_map(|row| row.validation_loss.map(|loss| (kilobytes(row.bytes), loss)))
            .collect();
        Self { precision, training, validation }
    }

    fn color(&self) -> RGBColor {
        match self.precision {
            Precision::Bf16 => RGBColor(31, 96, 180),
            Precision::Nvfp4 => RGBColor(214, 96, 20),
        }
    }
}

fn draw(pixels: &mut [u8], curves: &[Curve], unigram: f64) -> Drawn {
    static FONT_REGISTERED: Once = Once::new();
    FONT_REGISTERED.call_once(|| {
        // The only error is an unreadable font; drawing then says so.
        let _ = register_font("sans-serif", FontStyle::Normal, FONT);
    });
    let root = BitMapBackend::with_buffer(pixels, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    match curves {
        [first, second] if !second.training.is_empty() => {
            let (upper, lower) = root.split_vertically(SPLIT);
            draw_losses(&upper, curves, unigram)?;
            draw_gap(&lower, first, second)?;
        }
        _ => draw_losses(&root, curves, unigram)?,
    }
    root.present()?;
    Ok(())
}

fn draw_losses(area: &Area<'_>, curves: &[Curve], unigram: f64) -> Drawn {
    let points = || curves.iter().flat_map(|curve| curve.training.iter().chain(&curve.validation));
    let end = points().map(|point| point.0).fold(1.0, f64::max);
    let lowest = points().map(|point| point.1).fold(unigram, f64::min);
    // The first steps are near ln 256 and would flatten everything else: the curves start where they enter.
    let last = curves.iter().filter_map(|curve| curve.training.last()).map(|point| point.1);
    let top = last.fold(unigram, f64::max) + 0.5;
    let visible = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        points.iter().copied().filter(|point| point.1 <= top).collect()
    };
    let mut chart = ChartBuilder::on(area)
        .caption("Loss of the byte-level mixture-of-experts model", ("sans-serif", 26))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..end * 1.01, (lowest - 0.15)..top)?;
    mesh(&mut chart, "nats per byte", |y| format!("{y:.1}"))?;
    chart
        .draw_series(LineSeries::new([(0.0, unigram), (end, unigram)], BLACK.mix(0.45)))?
        .label(format!("byte frequencies alone ({unigram:.2})"))
        .legend(|(x, y)| PathElement::new([(x, y), (x + 28, y)], BLACK.mix(0.45)));
    for curve in curves {
        let color = curve.color();
        let precision = curve.precision;
        chart
            .draw_series(LineSeries::new(visible(&curve.training), color.stroke_width(2)))?
            .label(format!("{precision} training (smoothed)"))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 28, y)], color.stroke_width(2)));
        // Rings and filled discs: where the runs agree, both stay visible.
        let (radius, style) = match precision {
            Precision::Bf16 => (7, color.stroke_width(2)),
            Precision::Nvfp4 => (4, color.filled()),
        };
        chart
            .draw_series(
                visible(&curve.validation).into_iter().map(|point| Circle::new(point, radius, style)),
            )?
            .label(format!("{precision} validation"))
            .legend(move |(x, y)| Circle::new((x + 14, y), radius, style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .margin(14)
        .legend_area_size(40)
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.4))
        .label_font(("sans-serif", 17))
        .draw()?;
    Ok(())
}

/// How much higher the second run's loss is than the first one's, in percent.
fn draw_gap(area: &Area<'_>, first: &Curve, second: &Curve) -> Drawn {
    let gap = |a: &[(f64, f64)], b: &[(f64, f64)]| -> Vec<(f64, f64)> {
        let gaps = a.iter().zip(b).map(|(a, b)| (b.0, 100.0 * (b.1 / a.1 - 1.0)));
        // A loss of exactly zero has no gap.
        gaps.filter(|point| point.1.is_finite()).collect()
    };
    let training = gap(&first.training, &second.training);
    let validation = gap(&first.validation, &second.validation);
    let highest = training.iter().chain(&validation).map(|point| point.1.abs()).fold(1.0, f64::max) * 1.15;
    let end = first.training.last().map_or(1.0, |point| point.0);
    let mut chart = ChartBuilder::on(area)
        .margin(16)
        .margin_top(0)
        .x_label_area_size(48)
        .y_label_area_size(72)
        .build_cartesian_2d(0.0..end * 1.01, -highest..highest)?;
    let title = format!("{} over {}, %", second.precision, first.precision);
    mesh(&mut chart, &title, |y| format!("{y:+.1}"))?;
    chart.draw_series(LineSeries::new([(0.0, 0.0), (end, 0.0)], BLACK.mix(0.45)))?;
    chart.draw_series(LineSeries::new(training, second.color().stroke_width(2)))?;
    chart.draw_series(validation.into_iter().map(|point| Circle::new(point, 4, second.color().filled())))?;
    Ok(())
}

fn mesh(chart: &mut Chart<'_, '_>, y_title: &str, y_label: fn(&f64) -> String) -> Drawn {
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.1))
        .axis_style(BLACK.mix(0.6))
        .x_desc("thousand bytes trained on")
        .y_desc(y_title)
        .y_labels(8)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&y_label)
        .label_style(("sans-serif", 16))
        .axis_desc_style(("sans-serif", 18))
        .draw()?;
    Ok(())
}

fn encode(pixels: &[u8]) -> Result<Vec<u8>, png::EncodingError> {
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, SIZE.0, SIZE.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(file)
}
