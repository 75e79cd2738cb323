# A guest that counts on its first disk: it writes a count to the second sector, reads the sector back and prints the count in hex.
# The count is in its memory, too. It prints an X and ends if the disk fails or has another count.
.code16
.globl _start
_start:
 cli
 xor %ax,%ax
 mov %ax,%ds
 mov %ax,%ss
 mov %ax,%es
 mov $0x7000,%sp
 mov %dl,drive            # the BIOS's number of the disk it booted from
 cld
 sti
outer:
 incl count
 mov count,%eax
 mov $0x9000,%di
 mov $8,%cx
1: rol $4,%eax
 mov %al,%bl
 and $15,%bl
 add $48,%bl
 cmp $57,%bl
 jbe 2f
 add $39,%bl
2: mov %bl,(%di)
 inc %di
 loop 1b
 mov $0x4300,%ax          # extended write, without verifying
 movw $0x9000,packet+4
 call disk
 movl $0,0xa000
 mov $0x4200,%ax          # extended read
 movw $0xa000,packet+4
 call disk
 mov $0x9000,%si
 mov $0xa000,%di
 mov $256,%cx
 repe cmpsw
 jne bad
 mov $0xa000,%si
 mov $8,%cx
3: lodsb
 call put
 loop 3b
 mov $10,%al
 call put
 jmp outer
disk: movw $1,packet+2    # one sector
 mov drive,%dl
 mov $packet,%si
 int $0x13
 jc bad
 ret
bad: mov $'X',%al
 call put
 mov $10,%al
 call put
 cli
 hlt
put: mov %al,%ah          # waits until the last character has gone, or this one would replace it
 mov $0x3fd,%dx
5: in %dx,%al
 test $0x20,%al
 jz 5b
 mov %ah,%al
 mov $0x3f8,%dx
 out %al,%dx
 ret
drive: .byte 0
.align 4
count: .long 0
packet: .byte 16,0
 .word 1                  # one sector
 .word 0,0                # to or from here
 .quad 1                  # from sector 1 on
.org 510
.word 0xaa55
