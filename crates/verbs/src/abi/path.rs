//! Paths as address vectors of C, and back. An address vector says nothing of the P_Key.

use super::{ibv_ah_attr, ibv_gid, ibv_global_route};
use unbroken_types::{Gid, PathAttr};

/// What stands where there is no global header.
const NO_ROUTE: ibv_global_route = ibv_global_route {
    dgid: ibv_gid { raw: [0; 16] },
    flow_label: 0,
    sgid_index: 0,
    hop_limit: 0,
    traffic_class: 0,
};

impl From<&ibv_ah_attr> for PathAttr {
    fn from(ah: &ibv_ah_attr) -> PathAttr {
        let grh = ah.is_global != 0;
        let route = if grh { ah.grh } else { NO_ROUTE };
        PathAttr {
            // SAFETY: all bytes are there, whichever part was written.
            dest_gid: Gid(unsafe { route.dgid.raw }),
            sgid_index: route.sgid_index,
            port: ah.port_num,
            pkey_index: 0,
            sl: ah.sl,
            grh,
            flow_label: route.flow_label,
            hop_limit: route.hop_limit,
            traffic_class: route.traffic_class,
            dlid: ah.dlid,
            src_path_bits: ah.src_path_bits,
            static_rate: ah.static_rate,
        }
    }
}

impl From<&PathAttr> for ibv_ah_attr {
    fn from(path: &PathAttr) -> ibv_ah_attr {
        let route = ibv_global_route {
            dgid: ibv_gid { raw: path.dest_gid.0 },
            flow_label: path.flow_label,
            sgid_index: path.sgid_index,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
        };
        ibv_ah_attr {
            grh: if path.grh { route } else { NO_ROUTE },
            dlid: path.dlid,
            sl: path.sl,
            src_path_bits: path.src_path_bits,
            static_rate: path.static_rate,
            is_global: path.grh.into(),
            port_num: path.port,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_survives_its_way_through_verbs() {
        let path = PathAttr {
            dest_gid: Gid([7; 16]),
            sgid_index: 3,
            port: 2,
            pkey_index: 0,
            sl: 4,
            grh: true,
            flow_label: 9,
            hop_limit: 65,
            traffic_class: 5,
            dlid: 17,
            src_path_bits: 1,
            static_rate: 2,
        };
        assert_eq!(PathAttr::from(&ibv_ah_attr::from(&path)), path);
        let local = PathAttr::from(&ibv_ah_attr::from(&PathAttr { grh: false, ..path }));
        let none = PathAttr {
            dest_gid: Gid::default(),
            sgid_index: 0,
            flow_label: 0,
            hop_limit: 0,
            traffic_class: 0,
            ..path
        };
        assert_eq!(local, PathAttr { grh: false, ..none });
    }
}
