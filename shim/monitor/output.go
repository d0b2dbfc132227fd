package main

import (
	"bytes"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
	"berth/shim/logfile"
	"berth/shim/logfmt"
	"berth/shim/wire"
)

// stream is the container's stdout, stderr or terminal.
type stream struct {
	fd        int
	name      string
	frameType wire.Type
	encoder   *logfmt.Encoder
}

// readStream takes one portion of output to the log and to the clients. It returns
// how much, 0 if there is nothing now or nothing any more.
func (m *monitor) readStream(s *stream) int {
	n, err := unix.Read(s.fd, frame[wire.HeaderSize:])
	switch {
	case err == unix.EAGAIN || err == unix.EINTR:
		return 0
	case n <= 0: // end, or EIO: nobody has the terminal open
		m.forget(s.fd)
		return 0
	}
	m.logOutput(s, frame[wire.HeaderSize:wire.HeaderSize+n])
	wire.Header(frame[:0], s.frameType, n)
	m.broadcast(s.frameType, frame[:wire.HeaderSize+n])
	return n
}

// logOutput encodes data and writes it, in one piece if it fits.
func (m *monitor) logOutput(s *stream, data []byte) {
	if m.log < 0 {
		return
	}
	var stamp [logfmt.Overhead]byte
	timestamp := logfmt.AppendTime(stamp[:0], time.Now())
	buf := records[:0]
	if need := m.params.MaxLine + logfmt.Overhead; need > len(records) {
		buf = make([]byte, 0, need) // only with an unusual MaxLine
	}
	for len(data) > 0 {
		var out []byte
		out, data = s.encoder.Append(buf, timestamp, data)
		m.writeLog(out)
	}
}

// writeLog appends whole records to the log. What cannot be written is dropped:
// the container must go on. A record that was written in part is taken back, so
// that the next one begins on a line of its own.
func (m *monitor) writeLog(data []byte) {
	for len(data) > 0 && m.log >= 0 {
		failpoint.Reach("monitor.write-log")
		n, err := unix.Write(m.log, data)
		failpoint.Reach("monitor.log-written")
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return
		}
		if n < len(data) {
			n -= m.takeBack(data[:n])
			if n == 0 {
				return
			}
		}
		data = data[n:]
	}
}

// takeBack removes the incomplete record at the end of what was written, and
// returns its length.
func (m *monitor) takeBack(written []byte) int {
	torn := len(written) - 1 - bytes.LastIndexByte(written, '\n')
	var st unix.Stat_t
	if torn == 0 || unix.Fstat(m.log, &st) != nil || st.Size < int64(torn) {
		return 0
	}
	failpoint.Reach("monitor.take-back")
	if unix.Ftruncate(m.log, st.Size-int64(torn)) != nil {
		return 0
	}
	return torn
}

// reopenLog opens the log anew, after a rotation. An error leaves the old file in
// use and makes no new one.
func (m *monitor) reopenLog() error {
	if m.params.LogPath == "" {
		return nil
	}
	failpoint.Reach("monitor.open-log")
	fd, err := logfile.Open(m.params.LogDir, m.params.LogPath)
	if err != nil {
		return err
	}
	failpoint.Reach("monitor.log-opened")
	_ = unix.Close(m.log)
	m.log = fd
	return nil
}

// drain reads what init left in its pipes, until there is nothing now. Somebody
// may still hold the other end and write: no more is read than a pipe can hold.
func (m *monitor) drain(s *stream) {
	left, err := unix.FcntlInt(uintptr(s.fd), unix.F_GETPIPE_SZ, 0)
	if err != nil {
		left = 64 << 10 // a terminal
	}
	for left > 0 {
		n := m.readStream(s)
		if n == 0 {
			return
		}
		left -= n
	}
}

// flushLog writes the pieces of lines that are still held back.
func (m *monitor) flushLog() {
	var stamp [logfmt.Overhead]byte
	timestamp := logfmt.AppendTime(stamp[:0], time.Now())
	for _, s := range m.streams {
		m.writeLog(s.encoder.Flush(records[:0], timestamp))
	}
}
