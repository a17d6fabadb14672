package meta

import (
	"sync/atomic"
	"unsafe"
)

// The only unsafe code of the package: a state word is stored with one aligned 64-bit store that is ordered after the
// stores before it, so that a kill never leaves a word that says more than the body holds. Every record starts at a
// multiple of 64 bytes and mappings start at a page, so the words are aligned; storeWord checks it once more.

func storeWord(b []byte, off int, v uint64) {
	p := unsafe.Pointer(&b[off : off+8][0])
	if uintptr(p)%8 != 0 {
		panic("meta: state word is not aligned")
	}
	atomic.StoreUint64((*uint64)(p), v)
}
