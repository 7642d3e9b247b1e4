//! How pairs of hosts divide their traffic among rails that are apart.

/// Rounds of [`of_everyone`].
const ROUNDS: usize = 200;
/// What the parts of a pair add up to, about.
const PARTS: f64 = (1u64 << 24) as f64;

/// `[kind][kind][rail]` where a host talks to one other at a time: what the weaker of the two NICs
/// carries.
pub(crate) fn of_pairs(free_mbps: &[Vec<u64>]) -> Vec<Vec<Vec<u64>>> {
    let pair = |a: &Vec<u64>, b: &Vec<u64>| a.iter().zip(b).map(|(a, b)| *a.min(b)).collect();
    free_mbps.iter().map(|a| free_mbps.iter().map(|b| pair(a, b)).collect()).collect()
}

/// `[kind][kind][rail]` where all hosts talk to all: pairs exchange in proportion to the sum of
/// what their kinds own, and there are so many hosts of each kind.
///
/// The least time for the busiest NIC is a linear programme. It is approached by scaling: rails
/// that are too busy at either end of a pair lose a part of the pair's traffic to its other rails,
/// again and again. `tests/bounds.rs` compares with the programme.
pub(crate) fn of_everyone(
    free_mbps: &[Vec<u64>],
    owned: &[u64],
    hosts: &[usize],
) -> Vec<Vec<Vec<u64>>> {
    let kinds = free_mbps.len();
    let start = of_pairs(free_mbps);
    let volume = |a: usize, b: usize| (owned[a] + owned[b]) as f64;
    let peers = |a: usize, b: usize| hosts[b] as f64 - f64::from(u8::from(a == b));
    // what each pair sends on each rail
    let mut sent: Vec<Vec<Vec<f64>>> = (0..kinds)
        .map(|a| {
            (0..kinds)
                .map(|b| scaled(start[a][b].iter().map(|m| *m as f64).collect(), volume(a, b)))
                .collect()
        })
        .collect();
    // the least time that any schedule of these volumes takes
    let target = (0..kinds)
        .map(|a| {
            let all: f64 = (0..kinds).map(|b| volume(a, b) * peers(a, b)).sum();
            all / free_mbps[a].iter().sum::<u64>().max(1) as f64
        })
        .fold(0.0, f64::max);
    let mut best = sent.clone();
    let mut least = f64::INFINITY;
    for _ in 0..ROUNDS {
        let busy: Vec<Vec<f64>> = (0..kinds)
            .map(|a| {
                let load = |rail: usize| -> f64 {
                    (0..kinds).filter_map(|b| sent[a][b].get(rail).map(|s| s * peers(a, b))).sum()
                };
                let rails = free_mbps[a].iter().enumerate();
                rails
                    .map(|(rail, mbps)| if *mbps == 0 { 0.0 } else { load(rail) / *mbps as f64 })
                    .collect()
            })
            .collect();
        let busiest = busy.iter().flatten().copied().fold(0.0, f64::max);
        if busiest < least {
            least = busiest;
            best.clone_from(&sent);
        }
        if busiest <= target * 1.001 {
            break;
        }
        let relief = |busy: f64| if busy > target { (target / busy).sqrt() } else { 1.0 };
        for a in 0..kinds {
            for b in 0..kinds {
                let parts = sent[a][b].iter().enumerate();
                let parts = parts
                    .map(|(rail, s)| s * relief(busy[a][rail]) * relief(busy[b][rail]))
                    .collect();
                sent[a][b] = scaled(parts, volume(a, b));
            }
        }
    }
    let parts = |pair: Vec<f64>| scaled(pair, PARTS).into_iter().map(|p| p as u64).collect();
    let chosen = |a: usize, b: usize, pair: Vec<f64>| {
        if volume(a, b) > 0.0 {
            parts(pair)
        } else {
            start[a][b].clone()
        }
    };
    best.into_iter()
        .enumerate()
        .map(|(a, of_a)| of_a.into_iter().enumerate().map(|(b, pair)| chosen(a, b, pair)).collect())
        .collect()
}

/// The same proportions with this sum, if there is anything.
fn scaled(mut parts: Vec<f64>, sum: f64) -> Vec<f64> {
    let all: f64 = parts.iter().sum();
    if all > 0.0 {
        parts.iter_mut().for_each(|p| *p *= sum / all);
    }
    parts
}
