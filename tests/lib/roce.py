"""RoCEv2 packets as anybody can make them: the ICRC keeps no one out."""

import socket
import struct
import zlib

FIRST_PORT = 4791
UD_SEND_ONLY = 0x64


def roce_packet(opcode, flags, qpn, psn_word, payload, source, target) -> bytes:
    """A RoCEv2 packet with a right ICRC, from (address, port) to (address, port); `payload` is all
    that follows the BTH."""
    bth = struct.pack(">BBHII", opcode, flags, 0xFFFF, qpn, psn_word)
    body = bth + payload
    udp_length = 8 + len(body) + 4
    masked_ip = struct.pack(
        ">BBHHHBBH4s4s",
        0x45,
        0xFF,
        20 + udp_length,
        0,
        0x4000,
        0xFF,
        17,
        0xFFFF,
        socket.inet_aton(source[0]),
        socket.inet_aton(target[0]),
    )
    masked_udp = struct.pack(">HHHH", source[1], target[1], udp_length, 0xFFFF)
    masked_bth = bth[:4] + b"\xff" + bth[5:]
    crc = zlib.crc32(b"\xff" * 8 + masked_ip + masked_udp + masked_bth + payload)
    return body + struct.pack("<I", crc)


def datagram(qpn, src_qpn, qkey, payload, source, target) -> bytes:
    """A UD SEND with a right ICRC."""
    pad = -len(payload) % 4
    deth = struct.pack(">II", qkey, src_qpn)
    return roce_packet(
        UD_SEND_ONLY, 0x40 | pad << 4, qpn, 0, deth + payload + bytes(pad), source, target
    )


def sending_socket(address: str, port: int = 0) -> socket.socket:
    """A UDP socket that sends packets as a NIC does: never in fragments, which also makes the IP id
    0, as the ICRC covers it."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.IPPROTO_IP, 10, 2)
    made.bind((address, port))
    return made
