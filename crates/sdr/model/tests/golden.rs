//! The golden figures of the Python package (`tests/model/golden.py`): Rust gives the same, to
//! 10^-9.

use serde_json::Value;
use unbroken_erasure::{Code, Kind};
use unbroken_sdr_model::{Link, Loss, Scheme};

const SHARES: [f64; 3] = [0.5, 0.99, 0.999];
const CLOSE: f64 = 1e-9;

fn link(settings: &Value) -> Link {
    let packet = settings.get("packet_loss").map(|p| Loss::Packet(p.as_f64().unwrap()));
    Link {
        bandwidth_bps: settings["bandwidth_bps"].as_f64().unwrap(),
        rtt_s: settings["rtt_s"].as_f64().unwrap(),
        loss: packet.unwrap_or_else(|| Loss::Chunk(settings["chunk_loss"].as_f64().unwrap())),
        mtu_bytes: 4096,
        chunk_bytes: settings.get("chunk_bytes").map_or(65536, |bytes| bytes.as_u64().unwrap()),
    }
}

fn scheme(name: &[Value]) -> Scheme {
    let number = |i: usize| name[i].as_u64().unwrap() as usize;
    match name[0].as_str().unwrap() {
        "sr_rto" => Scheme::SrRto,
        "sr_nack" => Scheme::SrNack,
        "mds" => Scheme::Ec(Code::new(Kind::Mds, number(1), number(2)).unwrap()),
        "xor" => Scheme::Ec(Code::new(Kind::Xor, number(1), number(2)).unwrap()),
        other => panic!("scheme {other}"),
    }
}

#[test]
fn rust_gives_what_python_gives() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/model/golden.json");
    let rows: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(rows.len(), 2 * 10 * 5 * 5);
    for row in rows {
        let link = link(&row["link"]);
        let (channel, chunks) =
            (link.channel().unwrap(), link.chunks(row["bytes"].as_u64().unwrap()));
        let scheme = scheme(row["scheme"].as_array().unwrap());
        let message = scheme.message(&channel, chunks);
        let same = |name: &str, ours: f64, theirs: &Value| {
            let theirs = theirs.as_f64().unwrap();
            let close = (ours - theirs).abs() <= CLOSE * theirs.abs();
            assert!(close, "{name} is {ours} here, {theirs} in Python: {}", row);
        };
        assert_eq!(row["chunks"], chunks);
        same("chunk_loss", channel.loss, &row["chunk_loss"]);
        same("mean_s", message.mean_s(), &row["mean_s"]);
        same("undisturbed", message.undisturbed(), &row["undisturbed"]);
        for (share, theirs) in SHARES.iter().zip(row["quantiles_s"].as_array().unwrap()) {
            same(&format!("quantile {share}"), message.quantile_s(*share), theirs);
        }
        if let Scheme::Ec(code) = scheme {
            let coding = Scheme::coding(&channel, code);
            assert_eq!(row["parity"], coding.parity(chunks));
            same("fallback", coding.fallback(chunks), &row["fallback"]);
            same("paper_mean_s", coding.paper_mean_s(chunks), &row["paper_mean_s"]);
        }
    }
}
