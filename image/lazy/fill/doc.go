// Package fill lets containers use an EROFS layer before all of the layer's blob is present.
//
// # Contract
//
// The data file of a layer (image/layer) is sparse at first. An index of the blob
// (image/blobindex) says which part of the blob has which part of the file. The Engine fills the
// file: in the background, and at once where a process reads. A reader of a missing range waits. It
// gets the right bytes, or EIO after the configured time; never other bytes. The Engine verifies
// every byte of the blob before anything decompresses it (but see "Tables of contents"), and the
// digest of the whole tar at the end. Then the layer is like any other.
//
// An index is one of two: this node has made it while it unpacked the whole blob, or it was made of
// a table of contents whose digest the image's manifest has. No other node is asked for one.
//
// The kernel reports each read of a missing range by a fanotify event (FAN_PRE_ACCESS), and
// continues the read after the answer. Holes read as zeros without a mark on the file. So three
// rules keep zeros away from readers:
//
//   - The mark is set before the file is mounted, and removed after the file is complete.
//   - The mark lives as long as a descriptor of the fanotify group. The daemon has one, and so has
//     the monitor of each container on an incomplete layer (Engine.Keep). So it outlives the
//     daemon.
//   - A file that is not complete has an extended attribute. The Engine denies events of such a
//     file if it does not know the layer.
//
// # Order
//
// Spans that readers wait for come first, then the rest of the file that was read last, and those
// that the caller expects them to need (Prefer). All others wait until nobody has waited for a
// moment, because they share the line. The tar is hashed from its beginning meanwhile.
//
// # Tables of contents
//
// An index of chunks (package blobindex) is made of the table of contents in a blob. The manifest's
// digest covers the table, but nothing shows yet that the table describes the tar. Bytes of the
// blob are verified after they were decompressed, by the digests of the chunks. If the index is
// sealed, they are verified before.
// All bytes are also kept in BlobFile. When all spans are there, the Engine verifies the digest of
// the blob, fetches it again if it is wrong, and calls Prove with the blob. Prove compares the tar
// that the blob has with the layer's files. A proof that fails ends the layer (DataLoss), also one
// that cannot be made in Config.Proofs attempts. The caller then kills the containers on it.
//
// # Takeover
//
// Events are read into a ring, a memory file that the monitors hold open, too. The ring says which
// events the daemon has read and not answered. The next daemon takes group and ring from a monitor
// (pidfd_getfd). It answers those events after it has filled their ranges, with the descriptor
// numbers of the dead daemon: the kernel compares integers. Until an event is answered its number
// is occupied in the new process, so that no new event can get it (see takeover.go).
//
// If no process has kept the group, Engine.TookOver is false. Then earlier mounts of incomplete
// layers show zeros, and the caller kills the containers on them.
//
// # Durability
//
// The file "filled" has a bit for each span of the index. A bit is written after its data is on
// stable storage. Spans without a bit are filled again after a crash, with the same bytes.
//
// # Threads
//
// Fetching, decompressing and writing never wait for the goroutine that reads events, nor for a
// lock that it holds. So the daemon may read files of incomplete layers anywhere else.
package fill
