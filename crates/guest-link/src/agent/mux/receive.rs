//! What each frame of the guest means.

use vmfork_agent_proto::{Frame, Kind, RequestError, ToGuest, ToHost};

use super::mail::{self, Mail};
use super::{
    Channel, Event, Hold, Mux, REQUESTS_MAX, Request, Role, Rx, SENDS_MAX, Sending,
    UNREAD_BYTES_MAX, request_error,
};
use crate::agent::error::ProtocolError;

impl Mux {
    /// Bytes that were read.
    ///
    /// # Errors
    /// The guest broke the protocol. Close the link.
    pub(crate) fn on_bytes(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        self.decoder.push(bytes);
        while let Some(frame) = self.decoder.next_frame()? {
            self.check_silence();
            if frame.kind == Kind::Message {
                let message =
                    serde_json::from_slice::<ToHost>(&frame.payload).map_err(|error| {
                        ProtocolError::Message { channel: frame.channel, cause: error.to_string() }
                    })?;
                self.on_message(frame.channel, message)?;
            } else {
                self.on_stream(frame)?;
            }
        }
        if !self.decoder.is_at_boundary() {
            self.check_silence();
        }
        if self.answer_bytes > UNREAD_BYTES_MAX {
            return Err(ProtocolError::NotReading { bytes: self.answer_bytes });
        }
        Ok(())
    }

    /// Something has come: not what a guest that is held should do.
    fn check_silence(&mut self) {
        if let Hold::Held { broken, .. } = &mut self.hold
            && !std::mem::replace(broken, true)
        {
            self.events.push_back(Event::HoldBroken);
        }
    }

    fn on_message(&mut self, channel: u32, message: ToHost) -> Result<(), ProtocolError> {
        match message {
            ToHost::Hello { .. }
            | ToHost::Pong { .. }
            | ToHost::Prepared { .. }
            | ToHost::Confirmed { .. }
            | ToHost::Refused { .. } => self.on_plain(channel, message),
            ToHost::Started { .. }
            | ToHost::Exited { .. }
            | ToHost::Failed(_)
            | ToHost::File(_)
            | ToHost::Written { .. } => self.on_own(channel, message),
            ToHost::Credit { kind, bytes } => self.on_credit(channel, kind, bytes),
            ToHost::Abandon => {
                self.on_abandon(channel);
                Ok(())
            }
            ToHost::RequestTicket { .. }
            | ToHost::Clone { .. }
            | ToHost::Join { .. }
            | ToHost::KillTicket { .. }
            | ToHost::ExitClone { .. }
            | ToHost::Send { .. }
            | ToHost::Recv { .. } => self.on_request(channel, message),
        }
    }

    /// Messages that belong to no channel.
    fn on_plain(&mut self, channel: u32, message: ToHost) -> Result<(), ProtocolError> {
        if channel != 0 {
            return Err(ProtocolError::OutOfPlace { channel, what: "a message of the whole VM" });
        }
        match message {
            ToHost::Hello { protocol, agent_version, kernel, cpus, firstboot, pmem_root } => {
                self.events.push_back(Event::Hello {
                    protocol,
                    agent_version,
                    kernel,
                    cpus,
                    firstboot,
                    pmem_root,
                });
            }
            ToHost::Pong { token } => self.events.push_back(Event::Pong { token }),
            // An answer to a fork that was given up meanwhile means nothing any more.
            ToHost::Prepared { fork } => {
                if matches!(self.hold, Hold::Preparing { fork: asked } if asked == fork) {
                    self.hold = Hold::Held { fork, broken: false };
                    self.events.push_back(Event::Prepared);
                }
            }
            ToHost::Confirmed { fork } => match self.hold {
                Hold::Identifying { fork: asked } if asked == fork => {
                    self.hold = Hold::Open;
                    self.events.push_back(Event::Confirmed);
                }
                _ => return Err(ProtocolError::OutOfPlace { channel, what: "confirmed" }),
            },
            ToHost::Refused { fork, message } => match self.hold {
                Hold::Identifying { fork: asked } if asked == fork => {
                    self.hold = Hold::Nameless;
                    self.events.push_back(Event::Refused { message });
                }
                _ => return Err(ProtocolError::OutOfPlace { channel, what: "refused" }),
            },
            _ => {}
        }
        Ok(())
    }

    /// Messages about what this side opened. A channel may have been cancelled, or be a parent's.
    fn on_own(&mut self, channel: u32, message: ToHost) -> Result<(), ProtocolError> {
        if !channel.is_multiple_of(2) || channel == 0 {
            return Err(ProtocolError::OutOfPlace { channel, what: "a program's message" });
        }
        let Some(known) = self.channels.get_mut(&channel) else { return Ok(()) };
        let out_of_place = |what| Err(ProtocolError::OutOfPlace { channel, what });
        let event = match (&mut known.role, message) {
            (Role::Exec { started, .. }, ToHost::Started { pid }) if !*started => {
                *started = true;
                self.events.push_back(Event::Started { channel, pid });
                return Ok(());
            }
            (Role::Read { opened, .. }, ToHost::File(info)) if !*opened => {
                *opened = true;
                self.events.push_back(Event::File { channel, info });
                return Ok(());
            }
            (Role::Exec { started: true, .. }, ToHost::Exited { exit_code, signal }) => {
                Event::Exited { channel, exit_code, signal }
            }
            (Role::Write, ToHost::Written { bytes }) => Event::Written { channel, bytes },
            (_, ToHost::Failed(error)) => Event::Failed { channel, error },
            (_, ToHost::Started { .. }) => return out_of_place("started"),
            (_, ToHost::Exited { .. }) => return out_of_place("exited"),
            (_, ToHost::File(_)) => return out_of_place("file"),
            _ => return out_of_place("written"),
        };
        self.close_own(channel);
        self.events.push_back(event);
        Ok(())
    }

    fn on_credit(&mut self, channel: u32, kind: u8, bytes: u32) -> Result<(), ProtocolError> {
        let Some(Channel { tx: Some(tx), .. }) = self.channels.get_mut(&channel) else {
            return Ok(());
        };
        if kind != tx.kind as u8 || !tx.credited(bytes) {
            return Err(ProtocolError::OverCredit { channel, bytes });
        }
        self.schedule(channel);
        Ok(())
    }

    fn on_abandon(&mut self, channel: u32) {
        if channel.is_multiple_of(2) {
            return;
        }
        match self.channels.remove(&channel).map(|channel| channel.role) {
            Some(Role::Send(sending)) => self.give_up(channel, *sending),
            Some(Role::Incoming) => self.events.push_back(Event::AnswerGone { channel }),
            Some(_) => self.events.push_back(Event::Abandoned { channel }),
            None => {}
        }
    }

    fn on_request(&mut self, channel: u32, message: ToHost) -> Result<(), ProtocolError> {
        if channel.is_multiple_of(2) {
            return Err(ProtocolError::OutOfPlace { channel, what: "a request" });
        }
        if self.channels.contains_key(&channel) {
            return Err(ProtocolError::ChannelInUse { channel });
        }
        if self.channels.len() - self.hosts_channels >= REQUESTS_MAX {
            let error = request_error(
                rustix::io::Errno::AGAIN,
                &format!("{REQUESTS_MAX} requests of this guest are open already"),
            );
            self.answer(channel, &error);
            return Ok(());
        }
        let request = match message {
            ToHost::RequestTicket { count, hierarchical } => {
                Request::Ticket { count, hierarchical }
            }
            ToHost::Clone { ticket } => Request::Clone { ticket },
            ToHost::Join { ticket } => Request::Join { ticket },
            ToHost::KillTicket { ticket } => Request::Kill { ticket },
            ToHost::ExitClone { vmid, error } => Request::Exit { vmid, error },
            ToHost::Recv { ticket, vmid } => Request::Receive { ticket, vmid },
            ToHost::Send { vmid, length_bytes } => {
                self.begin_send(channel, vmid, length_bytes);
                return Ok(());
            }
            _ => return Err(ProtocolError::OutOfPlace { channel, what: "a request" }),
        };
        self.channels.insert(channel, Channel { role: Role::Request, tx: None });
        self.events.push_back(Event::Request { channel, request });
        Ok(())
    }

    fn begin_send(&mut self, channel: u32, vmid: u32, length_bytes: u64) {
        let refusal = if !self.mail.workers.contains(&vmid) {
            Some((rustix::io::Errno::INVAL, format!("no worker {vmid} lives in this VM")))
        } else if length_bytes > self.message_bytes_max {
            let max = self.message_bytes_max;
            let text = format!("message of {length_bytes} bytes; at most {max} are carried");
            Some((rustix::io::Errno::MSGSIZE, text))
        } else if self.sends >= SENDS_MAX {
            Some((rustix::io::Errno::AGAIN, format!("{SENDS_MAX} messages are on their way")))
        } else {
            None
        };
        if let Some((errno, text)) = refusal {
            let error = RequestError { errno: errno.raw_os_error(), message: text };
            self.answer(channel, &ToGuest::Error(error));
            return;
        }
        let sending = Sending {
            vmid,
            length_bytes,
            received_bytes: 0,
            pieces: Vec::new(),
            share: None,
            data: Rx::default(),
        };
        self.sends += 1;
        self.channels.insert(channel, Channel { role: Role::Send(Box::new(sending)), tx: None });
        self.mail.begin(channel, vmid, Mail::cost(length_bytes));
        self.admit_mail();
    }

    fn on_stream(&mut self, frame: Frame) -> Result<(), ProtocolError> {
        let Frame { kind, channel, end, payload } = frame;
        let misplaced = ProtocolError::StreamOutOfPlace { channel, kind };
        if channel == 0 || kind == Kind::Stdin {
            return Err(misplaced);
        }
        let Some(known) = self.channels.get_mut(&channel) else {
            return self.on_foreign(channel, kind, payload);
        };
        let rx = match (&mut known.role, kind) {
            (Role::Exec { stdout, started: true, .. }, Kind::Stdout) => stdout,
            (Role::Exec { stderr, started: true, .. }, Kind::Stderr) => stderr,
            (Role::Read { file, opened: true }, Kind::File) => file,
            (Role::Send(sending), Kind::Data) => &mut sending.data,
            // The rest of a message that was answered before its end.
            (Role::Request, Kind::Data) => return Ok(()),
            _ => return Err(misplaced),
        };
        if rx.ended {
            return Err(misplaced);
        }
        if !rx.arrived(u32::try_from(payload.len()).unwrap_or(u32::MAX)) {
            return Err(ProtocolError::Overrun { channel, kind });
        }
        rx.ended = end;
        match &known.role {
            Role::Send(_) => self.on_data(channel, payload, end),
            role => {
                let whole = end && matches!(role, Role::Read { .. });
                if whole {
                    self.close_own(channel);
                }
                if end || !payload.is_empty() {
                    self.events.push_back(Event::Data { channel, kind, bytes: payload, end });
                }
            }
        }
        Ok(())
    }

    /// Stream bytes of a channel that is not open here: one that was cancelled, or a parent's.
    fn on_foreign(
        &mut self,
        channel: u32,
        kind: Kind,
        payload: Vec<u8>,
    ) -> Result<(), ProtocolError> {
        let ours = channel >= self.first_channel && channel < self.next_channel;
        if !channel.is_multiple_of(2) || ours || payload.is_empty() {
            return Ok(());
        }
        let bytes = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        match kind {
            Kind::Stdout | Kind::Stderr => {
                self.answer(channel, &ToGuest::Credit { kind: kind as u8, bytes });
                self.events.push_back(Event::Foreign { bytes: payload });
            }
            _ => self.answer(channel, &ToGuest::Cancel),
        }
        Ok(())
    }

    fn on_data(&mut self, channel: u32, payload: Vec<u8>, end: bool) {
        let Some(Channel { role: Role::Send(sending), .. }) = self.channels.get_mut(&channel)
        else {
            return;
        };
        let bytes = payload.len();
        sending.received_bytes += bytes as u64;
        let short = end && sending.received_bytes < sending.length_bytes;
        if sending.received_bytes > sending.length_bytes || short {
            let error = RequestError {
                errno: rustix::io::Errno::INVAL.raw_os_error(),
                message: format!(
                    "message of {} bytes brought {}",
                    sending.length_bytes, sending.received_bytes
                ),
            };
            if let Some(Channel { role: Role::Send(sending), .. }) = self.channels.remove(&channel)
            {
                self.give_up(channel, *sending);
            }
            self.answer(channel, &ToGuest::Error(error));
            return;
        }
        if bytes > 0 {
            mail::append(&mut sending.pieces, payload);
        }
        if sending.share.is_some() {
            self.taken(channel, Kind::Data, bytes);
        }
        self.finish_send(channel);
    }

    /// A message that is whole and admitted becomes a request.
    fn finish_send(&mut self, channel: u32) {
        let Some(known) = self.channels.get_mut(&channel) else { return };
        let Role::Send(sending) = &mut known.role else { return };
        if !sending.data.ended {
            return;
        }
        let Some(share) = sending.share.take() else { return };
        let request = Request::Send {
            vmid: sending.vmid,
            pieces: std::mem::take(&mut sending.pieces),
            cost: Mail::cost(sending.length_bytes),
            share,
        };
        known.role = Role::Request;
        self.sends -= 1;
        self.events.push_back(Event::Request { channel, request });
    }

    fn give_up(&mut self, channel: u32, sending: Sending) {
        self.sends -= 1;
        let cost = Mail::cost(sending.length_bytes);
        self.mail.give_up(channel, sending.vmid, cost, sending.share.is_some());
        drop(sending);
        self.admit_mail();
    }

    /// Let those messages come whole for which there is room.
    pub(crate) fn admit_mail(&mut self) {
        while let Some((channel, entry)) = self.mail.admit() {
            let Some(Channel { role: Role::Send(sending), .. }) = self.channels.get_mut(&channel)
            else {
                continue;
            };
            match entry {
                Ok(share) => {
                    sending.share = Some(share);
                    let held = sending.data.uncredited();
                    self.taken(channel, Kind::Data, usize::try_from(held).unwrap_or(usize::MAX));
                    self.finish_send(channel);
                }
                Err(mail::Refused) => {
                    let text = format!(
                        "the host has no room for a message of {} bytes: too much is \
                         undelivered there",
                        sending.length_bytes
                    );
                    self.channels.remove(&channel);
                    self.sends -= 1;
                    self.answer(channel, &request_error(rustix::io::Errno::NOMEM, &text));
                }
            }
        }
    }
}
