//! The closed forms are the definitions: the paper's sums, term by term, where messages are short
//! enough for that, and samples drawn chunk by chunk.

use unbroken_erasure::Code;
use unbroken_sdr_model::{Channel, Completion, ErasureCoding, Lots, Scheme, SelectiveRepeat};

/// `E[T_SR] = Σ_q {1 − Π_i [1 − P(X_i ≥ q)]} + RTT` with `P(X_i ≥ q) = 1` for `q ≤ i·T`, else
/// `p^⌈(q − i·T)/O⌉`: T and O are whole numbers here, so that q runs over whole numbers, too.
fn term_by_term(chunks: u64, step: u64, overhead: u64, loss: f64, rtt: f64) -> f64 {
    let mut sum = 0.0;
    for q in 1.. {
        let done = |i: u64| match q {
            q if q <= i * step => 0.0,
            q => 1.0 - loss.powi((q - i * step).div_ceil(overhead) as i32),
        };
        let missing = 1.0 - (1..=chunks).map(done).product::<f64>();
        sum += missing;
        if missing < 1e-17 {
            break;
        }
    }
    sum + rtt
}

#[test]
fn the_mean_is_the_papers_sum() {
    let mut compared = 0;
    for (step, overhead) in [(1, 7), (2, 9), (3, 3), (5, 12), (1, 100), (10, 11), (7, 8)] {
        for chunks in [1, 2, 3, 7, 20, 60] {
            for loss in [1e-6, 0.01, 0.2, 0.7] {
                let channel = Channel { injection_s: step as f64, rtt_s: 10.0, loss };
                let model = SelectiveRepeat::new(&channel, (overhead - step) as f64);
                let (mean_s, sum) = (
                    model.message(chunks).mean_s(),
                    term_by_term(chunks, step, overhead, loss, channel.rtt_s),
                );
                assert!(
                    (mean_s / sum - 1.0).abs() < 1e-11,
                    "{chunks} {step} {overhead} {loss}: {mean_s} and {sum}"
                );
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 7 * 6 * 4);
}

#[test]
fn one_chunk_is_a_geometric_series() {
    for loss in [0.0, 1e-9, 0.1, 0.9] {
        let channel = Channel { injection_s: 0.25, rtt_s: 2.0, loss };
        let message = SelectiveRepeat::new(&channel, 6.0).message(1);
        assert!(
            (message.mean_s() / (2.25 + 6.25 * loss / (1.0 - loss)) - 1.0).abs() < 1e-13,
            "{loss}"
        );
        assert!((message.probability(2.25) - (1.0 - loss)).abs() < 1e-15);
        assert_eq!(message.probability(2.2), 0.0);
        assert!((message.undisturbed() - (1.0 - loss)).abs() < 1e-15);
    }
}

/// Messages longer than the timeout, with odd phases of several retransmissions at once: the
/// integral of the distribution itself.
#[test]
fn the_mean_is_the_integral_of_the_distribution() {
    for (chunks, step, rto) in
        [(500, 0.1, 7.03), (333, 0.377, 11.1), (2000, 0.01, 1.2345), (40, 1.0, 0.3)]
    {
        for loss in [1e-3, 0.1, 0.6] {
            let channel = Channel { injection_s: step, rtt_s: 3.0, loss };
            let message = SelectiveRepeat::new(&channel, rto).message(chunks);
            let (least, end) = (message.least_s(), message.quantile_s(1.0 - 1e-12));
            let n = 400_000;
            let width = (end - least) / f64::from(n);
            let rest: f64 = (0..n)
                .map(|i| 1.0 - message.probability(least + (f64::from(i) + 0.5) * width))
                .sum::<f64>()
                * width;
            let mean_s = message.mean_s();
            assert!(
                (mean_s / (least + rest) - 1.0).abs() < 1e-5,
                "{chunks} {loss}: {mean_s}, not {}",
                least + rest
            );
        }
    }
}

/// A quantile is the least time by which the share is done.
#[test]
fn quantiles_are_where_the_share_is_reached() {
    let channel = Channel { injection_s: 0.01, rtt_s: 1.0, loss: 0.02 };
    let mds = Code::mds(8, 1).unwrap();
    for scheme in [Scheme::SrRto, Scheme::SrNack, Scheme::Ec(mds)] {
        let message = scheme.message(&channel, 700);
        for share in [1e-6, 0.01, 0.5, 0.9, 0.99, 0.999, 0.999_999] {
            let time_s = message.quantile_s(share);
            assert!(message.probability(time_s * (1.0 + 1e-11)) >= share, "{scheme} {share}");
            let before = message.probability(time_s * (1.0 - 1e-11));
            assert!(before < share || time_s == message.least_s(), "{scheme} {share}: {before}");
        }
    }
}

/// Chunk by chunk, as the definition has it.
fn slowly(channel: &Channel, rto_s: f64, chunks: u64, lots: &mut Lots) -> f64 {
    let overhead_s = rto_s + channel.injection_s;
    let done =
        |i: u64| i as f64 * channel.injection_s + overhead_s * lots.failures(channel.loss.ln());
    (1..=chunks).map(done).fold(0.0, f64::max) + channel.rtt_s
}

/// The largest distance between the distributions of two sets of samples.
fn distance(mut a: Vec<f64>, mut b: Vec<f64>) -> f64 {
    a.sort_by(f64::total_cmp);
    b.sort_by(f64::total_cmp);
    let share = |all: &[f64], x: f64| {
        all.partition_point(|y| *y <= x * (1.0 + 1e-12)) as f64 / all.len() as f64
    };
    a.iter().chain(&b).map(|x| (share(&a, *x) - share(&b, *x)).abs()).fold(0.0, f64::max)
}

/// Samples jump from record to record; they are distributed as those that are drawn chunk by chunk.
#[test]
fn samples_are_those_of_single_chunks() {
    let n = 20_000;
    // Kolmogorov and Smirnov: a larger distance has a probability of 10^-6.
    let limit = (-(0.5e-6_f64.ln()) / n as f64).sqrt();
    for (chunks, loss, rto_s) in
        [(5, 0.3, 10.0), (200, 0.01, 0.7), (200, 0.2, 3.0), (60, 0.5, 0.05)]
    {
        let channel = Channel { injection_s: 0.01, rtt_s: 1.0, loss };
        let (mut one, mut other) = (Lots::new(1), Lots::new(2));
        let message = SelectiveRepeat::new(&channel, rto_s).message(chunks);
        let drawn: Vec<f64> = (0..n).map(|_| message.draw_s(&mut one)).collect();
        let right: Vec<f64> = (0..n).map(|_| slowly(&channel, rto_s, chunks, &mut other)).collect();
        let disturbed: Vec<f64> = (0..n).map(|_| message.draw_disturbed_s(&mut one)).collect();
        // Losses may be hidden behind the rest of the message, so that some take the shortest time,
        // too.
        assert!(disturbed.iter().all(|time_s| *time_s >= message.least_s()));
        let share = message.probability(message.least_s() * (1.0 + 1e-12));
        let calm =
            right.iter().filter(|time_s| **time_s <= message.least_s() * (1.0 + 1e-12)).count();
        assert!((calm as f64 / n as f64 - share).abs() < limit, "{share}");
        let share = message.undisturbed();
        let mixed: Vec<f64> = disturbed
            .iter()
            .enumerate()
            .map(
                |(i, time_s)| {
                    if (i as f64) < share * n as f64 {
                        message.least_s()
                    } else {
                        *time_s
                    }
                },
            )
            .collect();
        assert!(distance(drawn, right.clone()) < limit, "{chunks} {loss}");
        assert!(distance(mixed, right) < limit, "{chunks} {loss}");
    }
}

/// Losses of single chunks, judged by the code itself; what fails is sent again chunk by chunk.
fn slowly_coded(channel: &Channel, code: Code, chunks: u64, lots: &mut Lots) -> f64 {
    let (mut left, mut sent, mut again) = (chunks, 0, 0);
    while left > 0 {
        let data = left.min(code.data() as u64);
        let code = code.for_last(data as usize).unwrap();
        let lost = (0..code.chunks()).filter(|_| lots.uniform() <= channel.loss).collect();
        again += if code.recovers(&lost) { 0 } else { data };
        sent += code.chunks() as u64;
        left -= data;
    }
    let sent_s = sent as f64 * channel.injection_s;
    match again {
        0 => sent_s + channel.rtt_s,
        again => sent_s + 2.0 * channel.rtt_s + slowly(channel, 3.0 * channel.rtt_s, again, lots),
    }
}

#[test]
fn samples_of_codes_are_those_of_single_chunks() {
    let n = 20_000;
    let limit = (-(0.5e-6_f64.ln()) / n as f64).sqrt();
    let codes = [Code::mds(8, 2).unwrap(), Code::xor(8, 2).unwrap()];
    for (code, chunks, loss) in
        codes.into_iter().flat_map(|c| [(c, 43, 0.05), (c, 8, 0.2), (c, 1, 0.5), (c, 100, 0.01)])
    {
        let channel = Channel { injection_s: 0.01, rtt_s: 1.0, loss };
        let (mut one, mut other) = (Lots::new(3), Lots::new(4));
        let message: Completion = ErasureCoding::new(&channel, code, 3.0, 1.0).message(chunks);
        let drawn = (0..n).map(|_| message.draw_s(&mut one)).collect();
        let right: Vec<f64> =
            (0..n).map(|_| slowly_coded(&channel, code, chunks, &mut other)).collect();
        let mean_s = right.iter().sum::<f64>() / n as f64;
        let deviation_s =
            (right.iter().map(|t| (t - mean_s).powi(2)).sum::<f64>() / n as f64).sqrt();
        let error = (message.mean_s() - mean_s) / (deviation_s / (n as f64).sqrt());
        assert!(error.abs() < 4.0, "{code} {chunks} {loss}: {} and {mean_s}", message.mean_s());
        assert!(distance(drawn, right) < limit, "{code} {chunks} {loss}");
    }
}
