"""Peer ids as X.509, in a form stock gRPC accepts: both ends of a channel prove who they are.

    admission CA  --signs-->  intermediate (CN and key = identity)  --signs-->  leaf (P-256, this process only)

BoringSSL takes no Ed25519 leaf and Python gRPC has no verification callback, so the identity key acts as a CA. The
caller pins the callee with a trust anchor made from the peer id alone (an anchor's own signature is never evaluated).
The callee accepts chains that end in the admission CA and takes as the caller's identity the certificate that *really
signed* the leaf: the rest of a sent chain is unordered and may hold anything, other peers' intermediates included.

The admission CA's key is a published constant: admission is a formality here and the identity proof stands on the
identity key alone. Runs by invitation check invitations in Hello (`net.greeting`): a handshake that fails can give
no reason, knows neither roles nor bans, and would keep out a newcomer who asks for the manifest.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from swarmnet.clock import wall_time
from swarmnet.ids import PeerId
from swarmnet.net.identity import Identity, public_key
from swarmnet.wire.peer_ids import peer_id_from_public_bytes

TLS_NAME = "swarmnet.peer"
"""Subject and SAN of every leaf. It must differ from the issuer's name; identity is never read from it."""

CLOCK_SLACK_S = 24 * 3600.0
"""Leaves are valid from this long ago, so that a wrong clock is refused in words (Hello) and not by a TLS alert."""

LEAF_LIFE_S = 14 * 24 * 3600.0
_INTERMEDIATE_LIFE_S = 365 * 24 * 3600.0
_CENTURY = (datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC), datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC))

IssuerKey = ec.EllipticCurvePrivateKey | Ed25519PrivateKey
SubjectKey = ec.EllipticCurvePublicKey | Ed25519PublicKey


_ADMISSION = "swarmnet open admission"


@functools.cache
def _admission_key() -> ec.EllipticCurvePrivateKey:
    scalar = int.from_bytes(hashlib.sha256(b"swarmnet open admission: this key is public on purpose").digest())
    return ec.derive_private_key(scalar, ec.SECP256R1())


@functools.cache
def _admission_anchor() -> bytes:
    key = _admission_key()
    return _pem(_certificate(_ADMISSION, key.public_key(), issuer=_ADMISSION, key=key, is_ca=True, valid=_CENTURY))


def admit(peer: PeerId) -> bytes:
    """The intermediate (PEM) with which a peer admits itself for a year. Raises ValueError for a malformed peer id."""
    valid = _window(wall_time(), _INTERMEDIATE_LIFE_S)
    return _pem(
        _certificate(
            peer, public_key(peer), issuer=_ADMISSION, key=_admission_key(), is_ca=True, valid=valid, path_length=0
        )
    )


class Leaf:
    """This process's TLS key and its certificate, reissued by the identity key before half of its life has passed."""

    def __init__(self, identity: Identity, *, clock: Callable[[], float] = wall_time) -> None:
        self._identity, self._clock = identity, clock
        self.peer = identity.peer
        self._intermediate = admit(identity.peer)
        self._session = ec.generate_private_key(ec.SECP256R1())
        self.key = self._session.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        self._issued, self._chain = self._issue()

    @property
    def chain(self) -> bytes:
        """Leaf and intermediate, PEM."""
        # Also when this machine's clock was set back: then the leaf is not valid yet.
        if not 0 <= self._clock() - self._issued < LEAF_LIFE_S / 2:
            self._issued, self._chain = self._issue()
        return self._chain

    def channel_credentials(self, callee: PeerId) -> grpc.ChannelCredentials:
        """Credentials for a channel that opens only if `callee` is at the other end. Raises ValueError."""
        return grpc.ssl_channel_credentials(trust_anchor(callee), self.key, self.chain)

    def listener_credentials(self) -> grpc.ServerCredentials:
        """Credentials that demand an admitted certificate from every caller and follow the reissued leaf.

        gRPC asks at every connection, before it knows who calls, and frees what it had when it is given something
        new, without regard to a handshake that begins at that moment: if each request were answered, a caller that
        opens a few connections at once crashes the process (seen with 1.85). So it is given the leaf only when it has
        changed.
        """

        def configuration(chain: bytes) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(self.key, chain)], _admission_anchor())

        in_use = self.chain

        def reissued() -> grpc.ServerCertificateConfiguration | None:
            nonlocal in_use
            if self.chain == in_use:
                return None
            in_use = self.chain
            return configuration(in_use)

        return grpc.dynamic_ssl_server_credentials(configuration(in_use), reissued, require_client_authentication=True)

    def _issue(self) -> tuple[float, bytes]:
        now = self._clock()
        leaf = _certificate(
            TLS_NAME,
            self._session.public_key(),
            issuer=self._identity.peer,
            key=self._identity.key,
            is_ca=False,
            valid=_window(now, LEAF_LIFE_S),
            dns_name=TLS_NAME,
        )
        return now, _pem(leaf) + self._intermediate


_MOST_CHAIN_BYTES = 16 << 10
"""Of a caller's certificates in PEM: its leaf, and the one that admits it."""


@functools.lru_cache(maxsize=1024)
def trust_anchor(peer: PeerId) -> bytes:
    """A root certificate (PEM) that stands for `peer`, made from the peer id alone. Raises ValueError."""
    throw_away = Ed25519PrivateKey.generate()
    return _pem(_certificate(peer, public_key(peer), issuer=peer, key=throw_away, is_ca=True, valid=_CENTURY))


def caller_of(auth_context: Mapping[str, Sequence[bytes]]) -> PeerId | None:
    """Who is calling, from `context.auth_context()`. None if the chain proves no identity."""
    leaf, chain = auth_context.get("x509_pem_cert"), auth_context.get("x509_pem_cert_chain")
    if not leaf or not chain or len(leaf[0]) + len(chain[0]) > _MOST_CHAIN_BYTES:
        return None  # each certificate costs a signature check before any greeting
    return _signer_of(leaf[0], chain[0])


@functools.lru_cache(maxsize=1024)
def _signer_of(leaf_pem: bytes, chain_pem: bytes) -> PeerId | None:
    try:
        leaf, chain = x509.load_pem_x509_certificate(leaf_pem), x509.load_pem_x509_certificates(chain_pem)
        for candidate in chain:
            key = candidate.public_key()
            # A caller may send other peers' certificates along; one that did not sign the leaf proves nothing.
            if not isinstance(key, Ed25519PublicKey) or candidate.subject != leaf.issuer:
                continue
            peer = peer_id_from_public_bytes(key.public_bytes_raw())
            if leaf.issuer == _name(peer) and _issued_by(leaf, candidate):
                return peer
    except ValueError:  # junk where a certificate should be
        return None
    return None


def _issued_by(leaf: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _certificate(
    subject: str,
    subject_key: SubjectKey,
    *,
    issuer: str,
    key: IssuerKey,
    is_ca: bool,
    valid: tuple[datetime.datetime, datetime.datetime],
    path_length: int | None = None,
    dns_name: str | None = None,
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(subject_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid[0])
        .not_valid_after(valid[1])
        .add_extension(x509.BasicConstraints(is_ca, path_length), critical=True)
    )
    # gRPC compares this name with the one it dials; both ends use a fixed one.
    if dns_name is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
    return builder.sign(key, None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256())


def _window(now: float, life_s: float) -> tuple[datetime.datetime, datetime.datetime]:
    start = datetime.datetime.fromtimestamp(now - CLOCK_SLACK_S, datetime.UTC)
    return start, start + datetime.timedelta(seconds=CLOCK_SLACK_S + life_s)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)
