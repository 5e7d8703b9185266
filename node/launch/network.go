// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/thread"
)

// Network is a network namespace with nothing but a loopback device. It belongs to sandboxd's user namespace, not
// to the sandbox's: whatever capabilities a sandbox has, it cannot reconfigure it.
type Network struct {
	// NS is the namespace, to be joined by the thread that forks.
	NS *os.File
	// Sys is a detached, read-only sysfs. Only a thread inside the namespace that also owns it can make one.
	Sys *os.File
}

// NewNetwork makes one. It needs no sandbox, so that they can be made ahead of time.
func NewNetwork() (*Network, error) {
	return thread.Run(func() (*Network, bool, error) {
		home, err := threadNet()
		if err != nil {
			return nil, true, err
		}
		defer home.Close()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return nil, true, fmt.Errorf("network namespace: %w", err)
		}
		network, err := furnish()
		// A thread that cannot find its way home must not be used again.
		return network, unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil, err
	})
}

// Close lets go of the namespace; it lives on with the processes in it.
func (n *Network) Close() {
	n.NS.Close()
	n.Sys.Close()
}

func furnish() (*Network, error) {
	if err := loopbackUp(); err != nil {
		return nil, fmt.Errorf("loopback device: %w", err)
	}
	// Nobody but the sandbox is in there, so every port is for everybody.
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_unprivileged_port_start", []byte("0"), 0); err != nil {
		return nil, err
	}
	sys, err := newFilesystem("sysfs", unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, err
	}
	ns, err := threadNet()
	if err != nil {
		sys.Close()
		return nil, err
	}
	return &Network{NS: ns, Sys: sys}, nil
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request)
}

// threadNet opens the namespace of the calling thread; /proc/self would name the main thread's.
func threadNet() (*os.File, error) { return os.Open("/proc/thread-self/ns/net") }
