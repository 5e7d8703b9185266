// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// handshake bounds how long a sandbox may take to say whether a port is open.
const handshake = 10 * time.Second

// dialer connects to the sockets of sandboxes below one directory.
type dialer struct {
	runDir *os.File
	// endedDir is the name of a directory in it; empty if there is none.
	endedDir string
}

func newDialer(runDir, endedDir string) (*dialer, error) {
	fd, err := unix.Open(runDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: runDir, Err: err}
	}
	return &dialer{os.NewFile(uintptr(fd), runDir), endedDir}, nil
}

// dial is http.Transport's DialContext: address is what route.address made, with a port of http behind it.
func (d *dialer) dial(ctx context.Context, _, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	to, ok := parseAddress(host)
	if !ok {
		return nil, fmt.Errorf("not a route: %q", host)
	}
	if to.port == execdPort {
		return d.connect(ctx, to.id, "api")
	}
	conn, err := d.connect(ctx, to.id, "ports")
	if err != nil {
		return nil, err
	}
	if err := knock(ctx, conn, to.port); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// connect opens a sandbox's socket by descriptor: what lies below the directory cannot lead elsewhere.
func (d *dialer) connect(ctx context.Context, id, name string) (net.Conn, error) {
	fd, err := unix.Openat2(int(d.runDir.Fd()), id+"/"+name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil, d.gone(id, err)
	}
	defer unix.Close(fd)
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, err
	}
	if stat.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil, fmt.Errorf("%s of sandbox %s is not a socket", name, id)
	}
	conn, err := new(net.Dialer).DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(fd))
	if err != nil {
		return nil, d.gone(id, err)
	}
	return conn, nil
}

// gone says why there is no socket, as far as it is known.
func (d *dialer) gone(id string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		if fault := d.ended(id); fault != nil {
			return fault
		}
		if errors.Is(err, unix.ECONNREFUSED) {
			return reply.Errorf(wire.CodeIngressSandboxEnded, "The sandbox %s is ending.", id)
		}
		return reply.Errorf(wire.CodeIngressSandboxNotFound, "No sandbox %s runs here.", id).
			WithHint("It was deleted or never existed; list the sandboxes that do.")
	case errors.Is(err, unix.EAGAIN):
		return reply.Errorf(wire.CodeIngressBusy, "The sandbox does not take more connections right now.")
	}
	return err
}

// ended reads what sandboxd left about a sandbox that has ended and is not deleted yet; nil if it left nothing.
func (d *dialer) ended(id string) *reply.Fault {
	if d.endedDir == "" {
		return nil
	}
	fd, err := unix.Openat2(int(d.runDir.Fd()), d.endedDir+"/"+id, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return nil
	}
	file := os.NewFile(uintptr(fd), id)
	defer file.Close()
	var end wire.NodeEnd
	if err := json.NewDecoder(io.LimitReader(file, 4<<10)).Decode(&end); err != nil {
		return nil
	}
	return reply.Errorf(wire.CodeIngressSandboxEnded, "The sandbox %s has ended: %s, at %s.",
		id, describe(end), end.At.UTC().Format(time.RFC3339))
}

// describe says how it ended in the words of the node; free text of the program inside is not repeated.
func describe(end wire.NodeEnd) string {
	switch {
	case end.Reason == wire.NodeEndReasonExited && end.ExitCode != nil:
		return fmt.Sprintf("its entry point exited with code %d", *end.ExitCode)
	case end.Reason == wire.NodeEndReasonSignalled && end.Signal != "":
		return "its entry point was ended by " + end.Signal
	}
	return strings.ReplaceAll(string(end.Reason), "_", " ")
}

// knock asks execd for a port: `CONNECT <port>`, answered by OK or by ERR with the reason.
func knock(ctx context.Context, conn net.Conn, port int) error {
	deadline := time.Now().Add(handshake)
	if until, ok := ctx.Deadline(); ok && until.Before(deadline) {
		deadline = until
	}
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(conn, "CONNECT %d\n", port); err != nil {
		return err
	}
	answer, err := readLine(conn)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return reply.Errorf(wire.CodeBackendTimeout, "The sandbox did not say in time whether port %d is open.", port)
	}
	if err != nil {
		return err
	}
	if answer != "OK" {
		return refusal(answer, port)
	}
	return conn.SetDeadline(time.Time{})
}

// readLine reads byte by byte: what follows the line belongs to the connection's user.
func readLine(r io.Reader) (string, error) {
	var line []byte
	for one := make([]byte, 1); len(line) < 512; line = append(line, one[0]) {
		if _, err := io.ReadFull(r, one); err != nil {
			return "", err
		}
		if one[0] == '\n' {
			return string(line), nil
		}
	}
	return "", errors.New("the sandbox's answer is too long")
}

// refusal takes only the code from the sandbox's answer, and only one it may give; the words are ours.
func refusal(answer string, port int) error {
	fields := strings.Fields(answer)
	if len(fields) >= 2 && fields[0] == "ERR" && wire.Code(fields[1]) == wire.CodeIngressBadRoute {
		return reply.Errorf(wire.CodeIngressBadRoute, "Port %d of the sandbox is not open to clients.", port)
	}
	return reply.Errorf(wire.CodeIngressPortClosed, "Nothing listens on port %d inside the sandbox.", port)
}
