// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"context"
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
type dialer struct{ runDir *os.File }

func newDialer(runDir string) (*dialer, error) {
	fd, err := unix.Open(runDir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: runDir, Err: err}
	}
	return &dialer{os.NewFile(uintptr(fd), runDir)}, nil
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
		return nil, gone(id, err)
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
		return nil, gone(id, err)
	}
	return conn, nil
}

func gone(id string, err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return reply.Errorf(wire.CodeIngressSandboxNotFound, "There is no running sandbox %s here.", id)
	}
	return err
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
