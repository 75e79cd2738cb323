//! TLS 1.3 between members, both sides with certificates, and without one for who joins.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ClientConfig, Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    ServerConfig, SignatureScheme,
};

use super::{Authority, Identity, KeyError, provider};
use crate::id::{Fingerprint, HostId};
use crate::roster::Roster;

/// What a newcomer asks for (ALPN), which needs no certificate. Members ask for other protocols,
/// which need one.
pub const JOIN_PROTOCOL: &[u8] = b"vmfork-join/1";

/// Why the certificate of a peer was refused, though it may be the cluster's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("no member of this cluster has the certificate with the fingerprint {shown}")]
    NoMember { shown: Fingerprint },
    #[error("host {wanted} is no member of this cluster")]
    WantedNoMember { wanted: HostId },
    #[error("the certificate is not that of host {wanted}: its fingerprint is {shown}")]
    Another { wanted: HostId, shown: Fingerprint },
    #[error("`{name}` names no host of a cluster")]
    Name { name: String },
    #[error(
        "the certificate is not that of the host that made the token: its fingerprint is {shown}, not {wanted}"
    )]
    NotTheIssuer { wanted: Fingerprint, shown: Fingerprint },
}

impl From<PeerError> for Error {
    fn from(error: PeerError) -> Self {
        Self::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(error))))
    }
}

impl PeerError {
    /// The reason that a failed handshake has from here, whose own text shows no more than its
    /// fields.
    pub fn of(error: &Error) -> Option<&Self> {
        match error {
            Error::InvalidCertificate(CertificateError::Other(OtherError(it))) => it.downcast_ref(),
            _ => None,
        }
    }
}

/// Makes the settings of connections.
///
/// No session is ever resumed: that would skip the look at the certificate, and a host that left
/// could go on with an old session.
#[derive(Debug, Clone)]
pub struct Tls {
    identity: Identity,
    members: Arc<MemberVerifier>,
}

impl Tls {
    /// # Errors
    /// The identity's certificate is not this authority's for this host.
    pub fn new(
        identity: Identity,
        authority: &Authority,
        roster: Roster,
    ) -> Result<Self, KeyError> {
        let provider = provider();
        let servers = check_certified(&identity, authority)?;
        let mut roots = RootCertStore::empty();
        roots.add(authority.certificate().clone()).map_err(|source| KeyError::Tls { source })?;
        let clients = WebPkiClientVerifier::builder_with_provider(roots.into(), provider.clone())
            .build()
            .map_err(|source| KeyError::Verifier { source })?;
        let members = Arc::new(MemberVerifier { servers, clients, provider, roster });
        Ok(Self { identity, members })
    }

    /// This host's own.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// For connections of members, which may ask for one of these protocols (ALPN, the first in
    /// this list that both know).
    ///
    /// # Errors
    /// TLS can't be set up.
    pub fn server(&self, protocols: &[&[u8]]) -> Result<Arc<ServerConfig>, KeyError> {
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|source| KeyError::Tls { source })?
            .with_client_cert_verifier(Arc::clone(&self.members) as Arc<dyn ClientCertVerifier>);
        self.finish_server(config, protocols)
    }

    /// For connections of hosts that want to join: no certificate is asked for, and no protocol but
    /// [`JOIN_PROTOCOL`] is spoken. Choose it by [`Tls::wants_to_join`].
    ///
    /// # Errors
    /// TLS can't be set up.
    pub fn join_server(&self) -> Result<Arc<ServerConfig>, KeyError> {
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|source| KeyError::Tls { source })?
            .with_no_client_auth();
        self.finish_server(config, &[JOIN_PROTOCOL])
    }

    fn finish_server(
        &self,
        config: rustls::ConfigBuilder<ServerConfig, rustls::server::WantsServerCert>,
        protocols: &[&[u8]],
    ) -> Result<Arc<ServerConfig>, KeyError> {
        let chain = vec![self.identity.certificate().clone()];
        let mut config = config
            .with_single_cert(chain, self.identity.key()?)
            .map_err(|source| KeyError::Tls { source })?;
        config.alpn_protocols = protocols.iter().map(|it| it.to_vec()).collect();
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Ok(Arc::new(config))
    }

    /// Whether a client that has just said hello asks for [`JOIN_PROTOCOL`]: it gets
    /// [`Tls::join_server`].
    pub fn wants_to_join(hello: &ClientHello<'_>) -> bool {
        hello.alpn().is_some_and(|mut protocols| protocols.any(|it| it == JOIN_PROTOCOL))
    }

    /// For connections to members, for this protocol. The server name of each connection,
    /// [`HostId::server_name`], says which member is wanted; no other is accepted.
    ///
    /// # Errors
    /// TLS can't be set up.
    pub fn client(&self, protocol: &[u8]) -> Result<Arc<ClientConfig>, KeyError> {
        let chain = vec![self.identity.certificate().clone()];
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(|source| KeyError::Tls { source })?
            .dangerous()
            .with_custom_certificate_verifier(
                Arc::clone(&self.members) as Arc<dyn ServerCertVerifier>
            )
            .with_client_auth_cert(chain, self.identity.key()?)
            .map_err(|source| KeyError::Tls { source })?;
        finish_client(&mut config, protocol);
        Ok(Arc::new(config))
    }

    /// Which member is at the other end of a connection whose handshake is done: by
    /// `rustls::CommonState::peer_certificates`. `None` if it has left since, or showed no
    /// certificate.
    pub fn peer(&self, certificates: Option<&[CertificateDer<'_>]>) -> Option<HostId> {
        let shown = Fingerprint::of(certificates?.first()?);
        self.members.roster.member_by_fingerprint(shown)
    }
}

fn finish_client(config: &mut ClientConfig, protocol: &[u8]) {
    config.alpn_protocols = vec![protocol.to_vec()];
    config.resumption = Resumption::disabled();
}

/// Checks that the identity's certificate is the authority's for its host; returns who checks that
/// of others.
pub(crate) fn check_certified(
    identity: &Identity,
    authority: &Authority,
) -> Result<Arc<WebPkiServerVerifier>, KeyError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.certificate().clone()).map_err(|source| KeyError::Tls { source })?;
    let servers = WebPkiServerVerifier::builder_with_provider(roots.into(), provider())
        .build()
        .map_err(|source| KeyError::Verifier { source })?;
    let host = identity.host();
    servers
        .verify_server_cert(identity.certificate(), &[], &host.server_name(), &[], UnixTime::now())
        .map_err(|source| KeyError::NotCertified { host, source })?;
    Ok(servers)
}

/// For who joins: it has no certificate, and accepts no server but the one with this certificate.
pub(crate) fn join_client(issuer: Fingerprint) -> Result<Arc<ClientConfig>, KeyError> {
    let verifier = IssuerVerifier { issuer, provider: provider() };
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(|source| KeyError::Tls { source })?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier))
        .with_no_client_auth();
    finish_client(&mut config, JOIN_PROTOCOL);
    Ok(Arc::new(config))
}

/// Accepts certificates of the authority that are a member's now.
struct MemberVerifier {
    servers: Arc<WebPkiServerVerifier>,
    clients: Arc<dyn ClientCertVerifier>,
    provider: Arc<CryptoProvider>,
    roster: Roster,
}

impl fmt::Debug for MemberVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberVerifier").finish_non_exhaustive()
    }
}

/// The rest of both traits, which is the same for all of ours. TLS 1.2 is never offered.
macro_rules! signatures_of_tls13 {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _certificate: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("TLS 1.2 is not spoken here".to_owned()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.provider.signature_verification_algorithms;
            verify_tls13_signature(message, certificate, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

impl ServerCertVerifier for MemberVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let wanted = HostId::of_server_name(server_name)
            .ok_or_else(|| PeerError::Name { name: server_name.to_str().into_owned() })?;
        let Some(fingerprint) = self.roster.fingerprint_of(wanted) else {
            return Err(PeerError::WantedNoMember { wanted }.into());
        };
        let shown = Fingerprint::of(end_entity);
        if shown != fingerprint {
            return Err(PeerError::Another { wanted, shown }.into());
        }
        self.servers.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    signatures_of_tls13!();
}

impl ClientCertVerifier for MemberVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.clients.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let shown = Fingerprint::of(end_entity);
        if self.roster.member_by_fingerprint(shown).is_none() {
            return Err(PeerError::NoMember { shown }.into());
        }
        self.clients.verify_client_cert(end_entity, intermediates, now)
    }

    signatures_of_tls13!();
}

/// Accepts one certificate, that of the host that made a token.
struct IssuerVerifier {
    issuer: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl fmt::Debug for IssuerVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IssuerVerifier({})", self.issuer)
    }
}

impl ServerCertVerifier for IssuerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let shown = Fingerprint::of(end_entity);
        if shown == self.issuer {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(PeerError::NotTheIssuer { wanted: self.issuer, shown }.into())
        }
    }

    signatures_of_tls13!();
}
