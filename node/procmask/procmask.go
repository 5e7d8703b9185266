// SPDX-License-Identifier: Apache-2.0

// Package procmask covers parts of /proc and /sys that concern the host, not a sandbox. Most are closed to it by
// ownership already; this holds where a kernel forgot.
package procmask

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

var (
	readOnly = []string{"proc/bus", "proc/fs", "proc/irq", "proc/sys"}
	masked   = []string{
		"proc/acpi", "proc/asound", "proc/interrupts", "proc/kallsyms", "proc/kcore", "proc/keys", "proc/key-users",
		"proc/latency_stats", "proc/sched_debug", "proc/scsi", "proc/sysrq-trigger", "proc/timer_list", "proc/timer_stats",
		"sys/devices/virtual/powercap", "sys/firmware", "sys/kernel/security",
	}
)

// Apply covers them below the working directory: files with file, directories with directory, which is empty and on a
// read-only mount.
func Apply(file, directory string) error {
	for _, path := range readOnly {
		if err := bind(path, path); err != nil {
			return err
		}
		const flags = unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
		if err := unix.Mount("", path, "", flags, ""); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("read-only %s: %w", path, err)
		}
	}
	for _, path := range masked {
		var stat unix.Stat_t
		err := unix.Lstat(path, &stat)
		switch {
		case errors.Is(err, unix.ENOENT):
			continue
		case err != nil:
			return fmt.Errorf("%s: %w", path, err)
		}
		cover := file
		if stat.Mode&unix.S_IFMT == unix.S_IFDIR {
			cover = directory
		}
		if err := bind(cover, path); err != nil {
			return err
		}
	}
	return nil
}

// bind mounts one path on another; what this kernel does not have needs no mount.
func bind(from, to string) error {
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("bind %s on %s: %w", from, to, err)
	}
	return nil
}
