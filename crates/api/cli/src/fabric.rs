//! `unbroken fabric`.

use unbroken_events::NicStatus;
use unbroken_fabric::{
    device_kind_name, lid_of, link_layer_name, Fabric, NicKind, NicName, Runtime, Shape,
};
use unbroken_types::LinkLayer;

use crate::joined::{self, Joined};
use crate::output::{print, print_json, table, Result};
use crate::place::{programs, Place};
use unbroken_observe::{mark_drained, nic_statuses};

pub(crate) fn up(runtime: &Runtime, hosts: &[String], nics: u8, kind: NicKind) -> Result {
    if Joined::load(runtime)?.is_some() {
        let what = "this runtime folder is of a network of several machines; leave it with \
                    `unbroken fabric down`, or name another folder with --runtime";
        return Err(what.to_string().into());
    }
    let names: Vec<&str> = hosts.iter().map(String::as_str).collect();
    let wanted = Shape { kind, ..Shape::of(0, &names, nics) };
    let fabric = if runtime.fabric_toml().exists() {
        let fabric = Fabric::open(runtime)?;
        if (Shape { octet: 0, ..fabric.shape().clone() }) != wanted {
            let what =
                "there is a fabric of another shape; take it away with: unbroken fabric down";
            return Err(format!("{}: {what}", runtime.fabric_toml().display()).into());
        }
        fabric
    } else {
        Fabric::create(runtime, &wanted)?
    };
    let names: Vec<&str> = fabric.hosts().iter().map(|h| h.name.as_str()).collect();
    print(&format!(
        "hosts {} with {} NICs each; addresses 127.{}.<host>.<nic>; link layer {}, MTU {}, ports \
         {}, device {}; settings in {}\n",
        names.join(", "),
        nics,
        fabric.octet(),
        link_layer_name(kind.link_layer),
        kind.mtu.bytes(),
        kind.ports,
        device_kind_name(kind.device),
        runtime.fabric_toml().display(),
    ))
}

pub(crate) fn show(place: &Place, json: bool) -> Result {
    let joined = place.look()?.map(|runtime| Joined::load(&runtime)).transpose()?.flatten();
    if let Some(joined) = joined {
        return match json {
            true => print_json(&serde_json::json!({ "joined": joined })),
            false => print(&joined.line()),
        };
    }
    let fabric = place.fabric_or_error()?;
    let runtime = fabric.runtime();
    let mut nics = nic_statuses(runtime, Some(&fabric))?.nics;
    mark_drained(runtime, &mut nics)?;
    if json {
        let hosts: Vec<_> = fabric
            .hosts()
            .iter()
            .map(|h| serde_json::json!({ "name": h.name, "number": h.number, "nics": h.nics }))
            .collect();
        let rails: Vec<String> = fabric.switches().iter().map(ToString::to_string).collect();
        let nics: Vec<_> = nics
            .iter()
            .map(|n| {
                let link = link(&fabric, n);
                serde_json::json!({
                    "nic": n.nic, "addr": n.addr, "link_layer": link.name, "lid": link.lid, "mtu": link.mtu,
                    "device": n.device, "state": n.state, "faults": n.faults,
                })
            })
            .collect();
        return print_json(&serde_json::json!({
            "runtime": runtime.path(), "octet": fabric.octet(), "hosts": hosts, "switches": rails, "nics": nics,
        }));
    }
    let mut rows =
        vec![["nic", "address", "link layer", "LID", "MTU", "device", "state", "faults"]
            .map(String::from)
            .to_vec()];
    rows.extend(nics.into_iter().map(|n| {
        let LinkRow { name, lid, mtu } = link(&fabric, &n);
        let lid = if lid == 0 { "-".into() } else { lid.to_string() };
        vec![
            n.nic,
            n.addr,
            name.into(),
            lid,
            mtu.to_string(),
            n.device,
            n.state,
            n.faults.join(", "),
        ]
    }));
    print(&table(&rows))
}

/// What `fabric show` says of the link of a NIC.
struct LinkRow {
    name: &'static str,
    /// 0 with link layer Ethernet.
    lid: u16,
    /// Bytes.
    mtu: usize,
}

fn link(fabric: &Fabric, nic: &NicStatus) -> LinkRow {
    let kind =
        nic.nic.parse::<NicName>().map(|n| fabric.nic_kind(&n.host, n.index)).unwrap_or_default();
    let lid = match (kind.link_layer, nic.addr.parse()) {
        (LinkLayer::Infiniband, Ok(addr)) => lid_of(addr),
        _ => 0,
    };
    LinkRow { name: link_layer_name(kind.link_layer), lid, mtu: kind.mtu.bytes() }
}

pub(crate) fn down(runtime: &Runtime, force: bool) -> Result {
    let users = programs(runtime)?;
    if !users.is_empty() && !force {
        let pids: Vec<String> = users.iter().map(u32::to_string).collect();
        return Err(format!(
            "processes use the fabric: {}; end them, or give --force",
            pids.join(", ")
        )
        .into());
    }
    match joined::leave(runtime)? {
        true => Ok(()),
        false => Ok(Fabric::remove(runtime)?),
    }
}
