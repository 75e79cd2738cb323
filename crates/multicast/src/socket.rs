//! UDP sockets of a host's own network: to groups, and of them.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// What the kernel keeps until it is read: what comes in 20 ms at 1 Gbit/s, as it counts datagrams,
/// and some more.
const RECEIVE_BYTES: usize = 8 << 20;

/// A socket that sends to groups by the interface that has `address`, to no other network, and
/// receives what is sent to it alone.
pub(super) fn unicast(address: SocketAddrV4) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    sockopt::set_ip_multicast_if(&socket, address.ip())?;
    socket.set_multicast_ttl_v4(1)?;
    prepare(&socket)?;
    Ok(socket)
}

/// A socket that hears a group at the interface that has `own`.
pub(super) fn of_group(group: SocketAddrV4, own: Ipv4Addr) -> io::Result<UdpSocket> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)?;
    // Two images' groups may be one: then their sessions distinguish them.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    // To the group's address: what is sent to others, or to this host, is not seen.
    rustix::net::bind(&socket, &group)?;
    let socket = UdpSocket::from(socket);
    socket.join_multicast_v4(group.ip(), &own)?;
    prepare(&socket)?;
    Ok(socket)
}

fn prepare(socket: &UdpSocket) -> io::Result<()> {
    socket.set_nonblocking(true)?;
    // Only a process that may administer networks can exceed the system's bound: others get what
    // there is.
    if sockopt::set_socket_recv_buffer_size_force(socket, RECEIVE_BYTES).is_err() {
        sockopt::set_socket_recv_buffer_size(socket, RECEIVE_BYTES)?;
    }
    Ok(())
}

/// The next datagram, if one has come. Longer ones than ours are cut, and then are none of ours.
pub(super) fn receive<'a>(socket: &UdpSocket, buffer: &'a mut [u8]) -> io::Result<&'a mut [u8]> {
    loop {
        match socket.recv(buffer) {
            Ok(len) => return Ok(&mut buffer[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// How long a datagram waits for those before it to leave this host.
const SEND_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Send one, when there is room: a link that is full slows down the sender, and nothing is lost
/// here.
pub(super) fn send(socket: &UdpSocket, datagram: &[u8], to: SocketAddrV4) -> io::Result<()> {
    let mut has_waited = false;
    loop {
        match socket.send_to(datagram, to) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !has_waited => {
                let mut fds = [PollFd::new(socket, PollFlags::OUT)];
                has_waited = rustix::event::poll(&mut fds, Some(&SEND_WAIT))? == 0;
            }
            Err(error) => return Err(error),
        }
    }
}
