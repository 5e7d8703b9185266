// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/control"
)

// The user ids this platform uses on a host: Block n covers 65536 ids from FirstUID + n*BlockSize.
const (
	FirstUID  = 1879048192
	BlockSize = 65536
	// blockCount leaves out the last block, which holds the id -1.
	blockCount = (1<<32-FirstUID)/BlockSize - 1
)

// Blocks hands out uid blocks. Claims are flocked files in one directory that all instances of a host share, so
// two of them never use the same ids, and a claim ends with the last process that holds it, however that dies.
type Blocks struct {
	dir string

	mu   sync.Mutex
	next int
}

// OpenBlocks uses dir, which it makes if it is missing.
func OpenBlocks(dir string) (*Blocks, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	return &Blocks{dir: dir}, nil
}

// Block is one claimed range of ids.
type Block struct {
	N    int
	path string
	// lock is nil for a block that was adopted and whose claim only the sandbox itself holds.
	lock *os.File
}

// UID is the first user and group id of the block: root of the sandbox that lives in it.
func (b *Block) UID() int { return FirstUID + b.N*BlockSize }

// Claim takes a free block; blocks given back are used again last.
func (b *Blocks) Claim() (*Block, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for range blockCount {
		n := b.next
		b.next = (b.next + 1) % blockCount
		block, err := b.claim(n)
		if err != nil {
			return nil, err
		}
		if block != nil {
			return block, nil
		}
	}
	return nil, errors.New("every uid block of this host is in use")
}

// ClaimAt takes block n, or returns nil when somebody else has it.
func (b *Blocks) ClaimAt(n int) (*Block, error) {
	if n < 0 || n >= blockCount {
		return nil, nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.claim(n)
}

func (b *Blocks) claim(n int) (*Block, error) {
	path := filepath.Join(b.dir, strconv.Itoa(n))
	for {
		lock, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("uid block: %w", err)
		}
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			lock.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, nil
			}
			return nil, fmt.Errorf("uid block: %w", err)
		}
		// The previous holder unlinks the file while it still holds the lock; a lock on a file that is no longer
		// there excludes nobody.
		if sameFile(lock, path) {
			return &Block{N: n, path: path, lock: lock}, nil
		}
		lock.Close()
	}
}

// Adopt shares the claim that a living sandbox holds on block n. Where that is not allowed (rootless) the sandbox
// goes on holding it alone.
func (b *Blocks) Adopt(n int, p *Process) *Block {
	block := &Block{N: n, path: filepath.Join(b.dir, strconv.Itoa(n))}
	fd, failed := -1, error(nil)
	err := p.control(func(pidfd int) { fd, failed = unix.PidfdGetfd(pidfd, control.BlockFD, 0) })
	if err != nil || failed != nil {
		return block
	}
	lock := os.NewFile(uintptr(fd), block.path)
	if !sameFile(lock, block.path) {
		lock.Close()
		return block
	}
	block.lock = lock
	return block
}

// Sweep unlinks the files of blocks that nobody holds.
func (b *Blocks) Sweep() {
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return
	}
	for _, entry := range entries {
		n, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		if block, err := b.ClaimAt(n); err == nil && block != nil {
			block.Release()
		}
	}
}

// Release gives the block back. Call it only when no process with its ids is left.
func (b *Block) Release() {
	if b.lock == nil {
		return
	}
	os.Remove(b.path)
	b.lock.Close()
	b.lock = nil
}

func sameFile(f *os.File, path string) bool {
	here, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	return err == nil && os.SameFile(here, there)
}
