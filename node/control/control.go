// SPDX-License-Identifier: Apache-2.0

// Package control is the conversation between sandboxd and a sandbox's first process, over one inherited stream
// socket: a frame is four bytes of length and a JSON value, its open files travel with the length.
//
// Order of messages: sandboxd sends Room; init makes itself at home in it and answers Progress{Prepared}; sandboxd,
// once it has a request for it, sends Setup; init answers Progress{Ready}; sandboxd, once the sandbox is on record,
// sends Commit. Instead of either answer Progress{Failed} may come. Until init has seen Commit the end of the stream
// means that nobody will ever know of this sandbox, and init leaves. After Commit it means nothing.
package control

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// What a sandbox's first process finds at birth, besides /dev/null as standard input, output and error.
const (
	// InitName is its argv[0]: how the program knows which half it is.
	InitName = "opensandbox-init"
	// SocketFD is its side of the conversation.
	SocketFD = 3
	// BlockFD is the claim on its uid block, held to keep it.
	BlockFD = 4
)

// Room is everything a first process needs to build its root and give up its rights. Nothing in it belongs to a
// request, so that all of it can be done before there is one.
type Room struct {
	// Profile is the seccomp profile of commands: "strict" or "nested"; with "isolated" they are strict, and execd may make
	// namespaces.
	Profile string
	// Binds are the paths, relative to the new root, that the files named FileBind are mounted on, in that order.
	Binds []string
	// Own are paths below Binds that stay the sandbox's own, writable ones.
	Own []string
	// OneUser says that only id 0 exists inside (rootless).
	OneUser bool
	// CgroupVersion tells how to read FileCgroupEntry and FileCgroupMeter: "v1", "v2" or "none".
	CgroupVersion string
	// Files names the open files that came along, in order; names repeat.
	Files []string
}

// Setup turns a prepared first process into one particular sandbox. Nothing in it is secret towards the sandbox: the
// access token comes only as its digest.
type Setup struct {
	Env         []string
	Cwd         string
	Entrypoint  []string
	TokenSHA256 string
}

// Names of the open files that travel with a Room.
const (
	FileRoot        = "root"         // detached mount: the overlay
	FileBind        = "bind"         // detached mounts: read-only trees of the host
	FileDev         = "dev"          // detached mount: the read-only /dev template
	FileSys         = "sys"          // detached mount: sysfs of the sandbox's network namespace
	FileSpool       = "spool"        // directory of a detached mount: output of commands
	FileAPI         = "api"          // listening socket: execd's API
	FilePorts       = "ports"        // listening socket: the byte proxy
	FileCgroupEntry = "cgroup-entry" // cgroup.Entry
	FileCgroupMeter = "cgroup-meter" // cgroup.Meter
	FileEnd         = "end"          // regular file: how the sandbox ended
	FileLog         = "log"          // regular file: execd's own log
)

// Stage is how far init has come.
type Stage string

// The stages init reports.
const (
	// Prepared: root built, rights dropped, execd waits. One open file comes along: the configuration of /dev/shm.
	Prepared Stage = "prepared"
	Ready    Stage = "ready"  // execd answers and the entry point runs
	Failed   Stage = "failed" // it gives up; Step, Code and Message say why
)

// Progress is what init reports.
type Progress struct {
	Stage Stage
	// Step is the failed step in a word or two, such as "mount proc".
	Step string `json:",omitempty"`
	// Code is one of spec/errors.yaml where init knows better than "start failed".
	Code    string `json:",omitempty"`
	Message string `json:",omitempty"`
}

// Commit tells init that the sandbox is on record and may outlive sandboxd.
type Commit struct{ Committed bool }

// maxFrame bounds a frame; environment and entry point of a request stay well below it.
const maxFrame = 4 << 20

// maxFiles is the kernel's limit of files in one message (SCM_MAX_FD).
const maxFiles = 253

// Conn is one side of the conversation.
type Conn struct{ sock *net.UnixConn }

// Pair makes a connected pair; theirs is for the child's table of open files.
func Pair() (ours *Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	ours, err = Inherited(fds[0])
	if err != nil {
		unix.Close(fds[1])
		return nil, nil, err
	}
	return ours, os.NewFile(uintptr(fds[1]), "control"), nil
}

// Inherited takes over an open socket.
func Inherited(fd int) (*Conn, error) {
	f := os.NewFile(uintptr(fd), "control")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	sock, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, errors.New("control socket: not a Unix socket")
	}
	return &Conn{sock}, nil
}

// Close ends the conversation; the other side sees io.EOF.
func (c *Conn) Close() error { return c.sock.Close() }

// Socket is the connection itself, for deadlines.
func (c *Conn) Socket() *net.UnixConn { return c.sock }

// Send writes one value and the files that belong to it.
func (c *Conn) Send(v any, files ...*os.File) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(body) > maxFrame || len(files) > maxFiles {
		return fmt.Errorf("control message too large: %d bytes, %d files", len(body), len(files))
	}
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		oob = unix.UnixRights(fds...)
	}
	head := binary.BigEndian.AppendUint32(nil, uint32(len(body)))
	if _, _, err := c.sock.WriteMsgUnix(head, oob, nil); err != nil {
		return err
	}
	_, err = c.sock.Write(body)
	return err
}

// Receive reads one value and the files that came with it, or io.EOF when the other side is gone.
func (c *Conn) Receive(v any) ([]*os.File, error) {
	head := make([]byte, 4)
	oob := make([]byte, unix.CmsgSpace(maxFiles*4))
	n, oobn, flags, _, err := c.sock.ReadMsgUnix(head, oob)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, io.EOF
	}
	files, err := rights(oob[:oobn])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = errors.New("control message: open files were cut off")
	}
	if err == nil && n < len(head) {
		_, err = io.ReadFull(c.sock, head[n:])
	}
	if err == nil {
		err = c.body(binary.BigEndian.Uint32(head), v)
	}
	if err != nil {
		for _, f := range files {
			f.Close()
		}
		return nil, err
	}
	return files, nil
}

func (c *Conn) body(size uint32, v any) error {
	if size > maxFrame {
		return fmt.Errorf("control message of %d bytes", size)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(c.sock, body); err != nil {
		return err
	}
	return json.Unmarshal(body, v)
}

func rights(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "control"))
		}
	}
	return files, nil
}
