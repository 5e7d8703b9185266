// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/control"
	"opensandbox.io/node/file"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/seccomp"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/wire"
)

// firstName is how this program is called when it is the first process of a session.
const firstName = "isolated"

// controlFD is the conversation with execd.
const controlFD = 3

// setup is what the first process is told.
type setup struct {
	Mounts     []mount
	PrivateTmp bool
	Network    bool  // it has one of its own, which needs its loopback
	Bytes      int64 // for files in memory: of overlays together, and of /tmp
	UID, GID   int
	Groups     []int
	Env        []string // for paths of the file routes
	Cwd        string
}

// mount is something of the sandbox that the session sees in another way than read-only.
type mount struct {
	Source, Path string
	How          how
}

type how string

const (
	readWrite how = "rw"
	readOnly  how = "ro"
	overlay   how = "overlay"
)

// built is the answer: what went wrong, or nothing and these files: the root directory, the namespaces (see
// namespaceFiles), and one upper directory for each overlay in the order of the mounts.
type built struct {
	Problem string
	Hint    string // the caller can do something about it
}

// serve tells that a connection for file routes comes along.
type serve struct{}

// usersName is how it is called when it is there for its user namespace only.
const usersName = "isolated-users"

// MainIfWanted is the life of a process that execd has started as a part of a session; then it does not return.
func MainIfWanted() {
	switch {
	case len(os.Args) != 1:
	case os.Args[0] == firstName && os.Getpid() == 1:
		first()
	case os.Args[0] == usersName:
		users()
	}
}

// users has no rights, and the filter makes sure that whoever traces it gets none through it.
func users() {
	conn, err := control.Inherited(controlFD)
	if err != nil {
		os.Exit(1)
	}
	runtime.LockOSThread()
	if err := errors.Join(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), seccomp.Load(seccomp.Strict, true)); err != nil {
		os.Exit(1)
	}
	// See spawn.MapUsers.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0); err != nil {
		os.Exit(1)
	}
	_ = conn.Send(built{})
	_, _ = conn.Receive(&built{})
	os.Exit(0)
}

// first builds the session's root, gives up every right it has, collects
// orphans and answers for files as the session sees them. Its end is the end of all processes of the session.
func first() {
	conn, err := control.Inherited(controlFD)
	if err != nil {
		os.Exit(1)
	}
	var s setup
	if _, err := conn.Receive(&s); err != nil {
		os.Exit(1)
	}
	files, err := build(&s)
	if err == nil {
		err = giveUpEverything(&s)
	}
	if err != nil {
		answer := built{Problem: err.Error()}
		var bad *mistake
		if errors.As(err, &bad) {
			answer.Hint = bad.hint
		}
		_ = conn.Send(answer)
		os.Exit(1)
	}
	if err := conn.Send(built{}, files...); err != nil {
		os.Exit(1)
	}
	for _, f := range files {
		_ = f.Close()
	}
	answerForFiles(conn, &s)
	os.Exit(0)
}

// giveUpEverything leaves a process that can do no more than the programs of the session, and that they cannot trace.
func giveUpEverything(s *setup) error {
	// Orphans vanish by themselves, also when they come by the thousand.
	signal.Ignore(unix.SIGCHLD)
	spawn.OutlastSignals()
	unix.Umask(0o022)
	if had, err := unix.Getgroups(); err != nil || len(had) > 0 || len(s.Groups) > 0 {
		if err := syscall.Setgroups(s.Groups); err != nil && (len(s.Groups) > 0 || !errors.Is(err, unix.EPERM)) {
			return err // where a user namespace does not allow the call there are no other groups to have
		}
	}
	if err := syscall.Setresgid(s.GID, s.GID, s.GID); err != nil {
		return err
	}
	if err := syscall.Setresuid(s.UID, s.UID, s.UID); err != nil {
		return err
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&none[0])), 0); errno != 0 {
		return errno
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	if err := seccomp.Load(seccomp.Strict, true); err != nil {
		return err
	}
	return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// answerForFiles serves the file routes on connections that execd sends, until execd hangs up.
func answerForFiles(conn *control.Conn, s *setup) {
	mux := http.NewServeMux()
	file.New(s.Env, s.Cwd).Routes(mux)
	connections := make(chan net.Conn)
	server := &http.Server{Handler: reply.Handle(mux, slog.New(slog.DiscardHandler), wire.CodeUnknown)}
	go func() { _ = server.Serve(&handedOver{connections: connections, closed: make(chan struct{})}) }()
	for {
		files, err := conn.Receive(&serve{})
		if err != nil {
			_ = server.Shutdown(context.Background())
			return
		}
		for _, f := range files {
			c, err := net.FileConn(f)
			_ = f.Close()
			if err == nil {
				connections <- c
			}
		}
	}
}

// handedOver is a listener for connections that exist already.
type handedOver struct {
	connections <-chan net.Conn
	closed      chan struct{}
}

func (h *handedOver) Accept() (net.Conn, error) {
	select {
	case c := <-h.connections:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

func (h *handedOver) Close() error   { close(h.closed); return nil }
func (h *handedOver) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }
