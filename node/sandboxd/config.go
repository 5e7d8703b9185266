// SPDX-License-Identifier: Apache-2.0

// Package sandboxd is the daemon that makes sandboxes on this host: the one privileged process of the platform. It
// answers a closed request (names and numbers, never a path, an id or a right of the host), keeps what it made on
// record, and finds it again when it was killed.
package sandboxd

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Protocol is the number of the node API; it grows when the meaning of a field changes.
const Protocol = 1

// Config is how sandboxd is started.
type Config struct {
	// StateDir holds what must survive: records, files of sandboxes, logs.
	StateDir string
	// RunDir holds sockets. Empty: below /run/opensandbox or the user's runtime directory, by the instance's id.
	RunDir string
	// BlocksDir holds the claims on uid blocks. Empty: the one all instances of this host share.
	BlocksDir string
	// PipDir is offered to sandboxes whose host has a Python without pip. May be empty.
	PipDir string
	// Ingress is the program that serves clients. Empty: beside this one.
	Ingress string
	// FreeSpaceReserve is how many bytes of the disk creates must leave free.
	FreeSpaceReserve int64
	// DeadlineGrace is how long no server must have been connected before sandboxd enforces deadlines itself.
	DeadlineGrace time.Duration
	// IdleExit is how long it stays with neither sandbox nor server.
	IdleExit time.Duration
	// LogLevel is that of the log; ingress gets the same.
	LogLevel string
	// Shells is how many first processes wait for a create when nobody asks for any; 0: none ever.
	Shells  int
	Version string
}

// instance is the identity of a state directory: 32 hex digits.
func instance(stateDir string) (string, error) {
	path := filepath.Join(stateDir, "instance")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		id := make([]byte, 16)
		rand.Read(id)
		text = []byte(hex.EncodeToString(id))
		// Exclusive: the server may be making it at this moment.
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if errors.Is(err, fs.ErrExist) {
			return instance(stateDir)
		}
		if err != nil {
			return "", err
		}
		_, err = f.Write(append(text, '\n'))
		if err := errors.Join(err, f.Close()); err != nil {
			return "", err
		}
	} else if err != nil {
		return "", err
	}
	id := strings.TrimSpace(string(text))
	if raw, err := hex.DecodeString(id); err != nil || len(raw) != 16 {
		return "", fmt.Errorf("%s does not hold the id of an instance: is this the state directory of something else?", path)
	}
	return id, nil
}

// runBase is the directory of all instances that this user may run.
func runBase(uid int) string {
	if uid == 0 {
		return "/run/opensandbox"
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "opensandbox")
	}
	return fmt.Sprintf("/tmp/opensandbox-%d", uid)
}

// ownDirectory makes the run directory of a user who has no place given for it, where nobody else may have been first.
func ownDirectory(path string, uid int) error {
	if uid == 0 {
		return nil // below /run, where only root writes
	}
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if owner := info.Sys().(*syscall.Stat_t).Uid; !info.IsDir() || int(owner) != os.Geteuid() || info.Mode()&0o022 != 0 {
		return fmt.Errorf("%s belongs to somebody else; set XDG_RUNTIME_DIR to a directory of your own", path)
	}
	return nil
}

// socketPath checks that a path fits: the kernel takes 107 bytes.
func socketPath(path string) error {
	if len(path) > 107 {
		return fmt.Errorf("the run directory is too long: %s has %d bytes, a socket path may have 107", path, len(path))
	}
	return nil
}
